#include "client/channels/replica_names.h"

#include <arpa/nameser.h>
#include <netdb.h>
#include <netinet/in.h>
#include <resolv.h>
#include <sys/socket.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <system_error>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/read_file.h"
#include "client/channels/address.h"

namespace attnd {
namespace {

constexpr int kMaxSrvAnswerBytes = 64 << 10;  // DNS has no longer one
constexpr uintmax_t kMaxAddressFileBytes = 1 << 20;

void AddOnce(std::string target, std::vector<std::string>& targets) {
  if (std::find(targets.begin(), targets.end(), target) == targets.end()) {
    targets.push_back(std::move(target));
  }
}

std::vector<std::string> LookUpHost(const ReplicaName& name) {
  addrinfo hints{}, *list = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_ADDRCONFIG;
  if (getaddrinfo(name.host.c_str(), name.port.c_str(), &hints, &list) != 0) return {};
  std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, freeaddrinfo);
  std::vector<std::string> targets;
  for (const addrinfo* one = list; one != nullptr; one = one->ai_next) {
    char host[NI_MAXHOST], port[NI_MAXSERV];
    if (getnameinfo(one->ai_addr, one->ai_addrlen, host, sizeof(host), port, sizeof(port),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
      continue;
    }
    AddOnce(one->ai_family == AF_INET6 ? absl::StrCat("ipv6:[", host, "]:", port)
                                       : absl::StrCat("ipv4:", host, ":", port),
            targets);
  }
  return targets;
}

// "host:port" of each record (RFC 2782: priority, weight, port, target); gRPC looks the hosts up.
// Priorities and weights are not regarded: the client measures who is free.
std::vector<std::string> LookUpService(const std::string& name) {
  struct __res_state state {};
  if (res_ninit(&state) != 0) return {};
  std::vector<unsigned char> answer(kMaxSrvAnswerBytes);
  const int size = res_nquery(&state, name.c_str(), ns_c_in, ns_t_srv, answer.data(),
                              static_cast<int>(answer.size()));
  res_nclose(&state);
  std::vector<std::string> targets;
  if (size < NS_HFIXEDSZ) return {};
  const unsigned char *at = answer.data() + NS_HFIXEDSZ, *end = answer.data() + size;
  auto skip = [&](int more) {  // a name, and bytes behind it; false: the answer ends before
    const int bytes = at < end ? dn_skipname(at, end) : -1;
    if (bytes < 0 || end - at - bytes < more) return false;
    at += bytes + more;
    return true;
  };
  auto number = [](const unsigned char* from) { return from[0] << 8 | from[1]; };
  constexpr int kQuestionsAt = 4, kAnswersAt = 6;
  const int questions = number(&answer[kQuestionsAt]), answers = number(&answer[kAnswersAt]);
  for (int n = 0; n < questions; ++n) {
    if (!skip(NS_QFIXEDSZ)) return {};
  }
  for (int n = 0; n < answers && skip(NS_RRFIXEDSZ); ++n) {
    const int type = number(at - NS_RRFIXEDSZ), bytes = number(at - 2);
    if (bytes > end - at) break;
    constexpr int kPortAt = 4, kTargetAt = 6;
    char host[NS_MAXDNAME];
    if (type == ns_t_srv && bytes > kTargetAt &&
        dn_expand(answer.data(), end, at + kTargetAt, host, sizeof(host)) >= 0) {
      AddOnce(absl::StrCat(host, ":", number(at + kPortAt)), targets);
    }
    at += bytes;
  }
  return targets;
}

bool IsText(absl::string_view line) {
  return absl::c_all_of(line, [](unsigned char c) { return absl::ascii_isprint(c); });
}

// Passes over what is no file of addresses: folders, pipes, dumps, lines of something else.
void AddLines(const std::string& path, std::vector<std::string>& targets) {
  std::error_code error;
  if (!IsRegularFile(path) || std::filesystem::file_size(path, error) > kMaxAddressFileBytes) {
    return;
  }
  const std::string text = ReadFile(path);
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    const absl::string_view address = absl::StripAsciiWhitespace(line);
    if (IsText(address) && CheckAddress(address).ok() && !ReplicaNameOf(address).has_value()) {
      AddOnce(std::string(address), targets);
    }
  }
}

// Hidden files are those that somebody is writing.
std::vector<std::string> ReadDirectory(const std::string& path) {
  std::vector<std::string> files, targets;
  std::error_code error;
  for (std::filesystem::directory_iterator file(path, error), end; !error && file != end;
       file.increment(error)) {
    if (file->path().filename().string()[0] != '.') files.push_back(file->path().string());
  }
  std::sort(files.begin(), files.end());
  for (const std::string& file : files) AddLines(file, targets);
  return targets;
}

}  // namespace

std::optional<ReplicaName> ReplicaNameOf(absl::string_view target) {
  using Kind = ReplicaName::Kind;
  for (const auto& [scheme, kind] : {std::pair("srv:", Kind::kSrv), std::pair("file:", Kind::kFile),
                                     std::pair("dir:", Kind::kDirectory)}) {
    absl::string_view rest = target;
    if (!absl::ConsumePrefix(&rest, scheme)) continue;
    if (absl::ConsumePrefix(&rest, "//") && kind == Kind::kSrv) absl::ConsumePrefix(&rest, "/");
    return ReplicaName{.host = std::string(rest), .kind = kind};
  }
  if (!absl::ConsumePrefix(&target, "dns:")) return std::nullopt;
  if (absl::ConsumePrefix(&target, "//") && !absl::ConsumePrefix(&target, "/")) return std::nullopt;
  size_t colon = target.rfind(':');
  if (colon == absl::string_view::npos || colon == 0) return std::nullopt;
  return ReplicaName{std::string(target.substr(0, colon)), std::string(target.substr(colon + 1))};
}

std::vector<std::string> LookUpReplicas(const ReplicaName& name) {
  std::vector<std::string> targets;
  switch (name.kind) {
    case ReplicaName::Kind::kDns:
      return LookUpHost(name);
    case ReplicaName::Kind::kSrv:
      return LookUpService(name.host);
    case ReplicaName::Kind::kDirectory:
      return ReadDirectory(name.host);
    case ReplicaName::Kind::kFile:
      AddLines(name.host, targets);
  }
  return targets;
}

std::string WhyNoReplica(const ReplicaName& name) {
  const std::string& path = name.host;
  std::error_code error;
  switch (name.kind) {
    case ReplicaName::Kind::kDns:
    case ReplicaName::Kind::kSrv:
      return absl::StrCat("the name ", name.host, " has no address");
    case ReplicaName::Kind::kDirectory:
      if (std::filesystem::is_directory(path, error)) {
        return absl::StrCat("no file in the folder ", path,
                            " has a line host:port, the address of a daemon");
      }
      return absl::StrCat("there is no folder ", path, " on this host");
    case ReplicaName::Kind::kFile:
      break;
  }
  if (std::filesystem::exists(path, error)) {
    return absl::StrCat("the file ", path,
                        " does not have a line host:port, the address of a daemon");
  }
  return absl::StrCat("there is no file ", path, " on this host");
}

}  // namespace attnd
