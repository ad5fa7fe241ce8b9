#include "server/security/certificate_watch.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/read_file.h"
#include "base/status_macros.h"
#include "net/file_descriptor.h"
#include "server/security/certificate_files.h"

namespace attnd {
namespace {

constexpr absl::string_view kDescriptors = "/proc/self/fd/";

std::string PathOf(const FileDescriptor& fd) {
  return fd.valid() ? absl::StrCat(kDescriptors, fd.get()) : "";
}

// A file in memory; none for the contents of a file that is not given.
absl::StatusOr<FileDescriptor> InMemory(const std::string& contents) {
  if (contents.empty()) return FileDescriptor();
  FileDescriptor fd(memfd_create("attnd_tls", MFD_CLOEXEC));
  if (write(fd.get(), contents.data(), contents.size()) != static_cast<ssize_t>(contents.size())) {
    return absl::ResourceExhaustedError("--tls_cert: no memory or descriptor for a copy");
  }
  return fd;
}

// The file at `to` is that of `from` from now on.
void Replace(const FileDescriptor& from, absl::string_view to) {
  int descriptor = 0;
  if (!absl::ConsumePrefix(&to, kDescriptors)) return;  // not given
  CHECK(absl::SimpleAtoi(to, &descriptor));
  CHECK(dup3(from.get(), descriptor, O_CLOEXEC) == descriptor);
}

}  // namespace

absl::StatusOr<std::unique_ptr<CertificateWatch>> CertificateWatch::Start(const TlsOptions& files,
                                                                          Logger& log) {
  auto watch = std::unique_ptr<CertificateWatch>(new CertificateWatch(files, log));
  absl::MutexLock lock(&watch->mutex_);
  RETURN_IF_ERROR(watch->Update());
  watch->CheckTimes();
  watch->looks_.emplace(files.refresh, [raw = watch.get()] { raw->Look(); });
  return watch;
}

void CertificateWatch::Look() {
  absl::MutexLock lock(&mutex_);
  const std::array<std::string, 3> before = contents_;
  std::string fault(Update().message());
  if (contents_ != before) log_.Info("certificates_changed");
  if (!fault.empty() && fault != last_fault_) {
    log_.Warning("certificates_kept",
                 {{"message", fault}, {"cure", "correct the files; the former ones stay in use"}});
  }
  last_fault_ = std::move(fault);
  CheckTimes();
}

// Names the files when they are right, since their names say more than the copies'.
void CertificateWatch::CheckTimes() {
  const TlsOptions& served = last_fault_.empty() ? files_ : copies_;
  std::string fault(CheckCertificateTimes(served, absl::Now()).message());
  if (!fault.empty() && fault != last_time_fault_) {
    log_.Warning("certificate_not_valid",
                 {{"message", fault}, {"cure", "replace the file; it is read again by itself"}});
  }
  last_time_fault_ = std::move(fault);
}

absl::Status CertificateWatch::Update() {
  RETURN_IF_ERROR(CheckTlsFiles(files_));
  std::array<std::string, 3> contents = {ReadFile(files_.certificate), ReadFile(files_.key),
                                         ReadFile(files_.client_ca)};
  if (contents == contents_) return absl::OkStatus();
  ASSIGN_OR_RETURN(FileDescriptor certificate, InMemory(contents[0]));
  ASSIGN_OR_RETURN(FileDescriptor key, InMemory(contents[1]));
  ASSIGN_OR_RETURN(FileDescriptor client_ca, InMemory(contents[2]));
  const TlsOptions fresh{
      .certificate = PathOf(certificate), .key = PathOf(key), .client_ca = PathOf(client_ca)};
  RETURN_IF_ERROR(CheckTlsFiles(fresh));  // they may have changed since they were looked at
  if (copies_.certificate.empty()) {
    copies_ = fresh;
    for (FileDescriptor* fd : {&certificate, &key, &client_ca}) fd->Release();
  } else {
    Replace(certificate, copies_.certificate);
    Replace(key, copies_.key);
    Replace(client_ca, copies_.client_ca);
  }
  contents_ = std::move(contents);
  return absl::OkStatus();
}

}  // namespace attnd
