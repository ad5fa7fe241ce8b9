#include "server/security/auth.h"

#include <sys/stat.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "base/whole_file.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

constexpr size_t kShortestToken = 16;

// Time depends on the lengths alone.
bool EqualInConstantTime(absl::string_view a, absl::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned difference = 0;
  for (size_t n = 0; n < a.size(); ++n) {
    difference |= static_cast<unsigned char>(a[n]) ^ static_cast<unsigned char>(b[n]);
  }
  return difference == 0;
}

// Checks that a header can carry the word, which holds no spaces.
bool IsToken(absl::string_view word) {
  return word.size() >= kShortestToken &&
         std::all_of(word.begin(), word.end(), [](char c) { return c > ' ' && c <= '~'; });
}

absl::string_view View(grpc::string_ref text) { return {text.data(), text.size()}; }

}  // namespace

Authenticator::Authenticator() : current_(std::make_unique<Current>()) {
  absl::MutexLock lock(&current_->mutex);
  current_->entries = std::make_shared<Entries>();
}

std::shared_ptr<const Authenticator::Entries> Authenticator::entries() const {
  absl::MutexLock lock(&current_->mutex);
  return current_->entries;
}

bool Authenticator::Replace(Authenticator other) {
  std::shared_ptr<const Entries> fresh = other.entries();
  absl::MutexLock lock(&current_->mutex);
  if (*fresh == *current_->entries) return false;
  current_->entries = std::move(fresh);
  return true;
}

absl::StatusOr<Authenticator> Authenticator::FromTokenFile(const std::string& path) {
  struct stat what {};
  if (stat(path.c_str(), &what) == 0 && !S_ISREG(what.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--token_file: expected a regular file, got a folder, pipe or device, ", path));
  }
  ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path, "--token_file"));
  return FromTokenText(text);
}

absl::StatusOr<Authenticator> Authenticator::FromTokenText(absl::string_view text) {
  auto entries = std::make_shared<Entries>();
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = absl::StripAsciiWhitespace(line.substr(0, line.find('#')));
    if (line.empty()) continue;
    std::vector<std::string> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
    if (words.size() != 2 || !IsToken(words[1])) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--token_file: expected \"name token\" with a token of at least ", kShortestToken,
          " printable ASCII bytes, got something else in line ", number));
    }
    for (const Entry& entry : *entries) {
      if (entry.token != words[1] || entry.name == words[0]) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "--token_file: expected each token under one name, got one again in line ", number));
    }
    entries->push_back({words[0], words[1]});
  }
  if (entries->empty()) {
    return absl::InvalidArgumentError("--token_file: expected at least one token, got none");
  }
  Authenticator auth;
  absl::MutexLock lock(&auth.current_->mutex);
  auth.current_->entries = std::move(entries);
  return auth;
}

absl::StatusOr<std::string> Authenticator::CheckToken(absl::string_view header) const {
  constexpr absl::string_view kScheme = "Bearer ";
  if (!absl::StartsWithIgnoreCase(header, kScheme)) {
    return Failure(absl::StatusCode::kUnauthenticated, reason::kTokenMissing,
                   "authorization: expected \"Bearer TOKEN\", got none");
  }
  absl::string_view token = absl::StripAsciiWhitespace(header.substr(kScheme.size()));
  const Entry* found = nullptr;
  std::shared_ptr<const Entries> known = entries();
  for (const Entry& entry : *known) {  // all of them, whichever matches
    if (EqualInConstantTime(entry.token, token)) found = &entry;
  }
  if (found != nullptr) return found->name;
  return Failure(absl::StatusCode::kUnauthenticated, reason::kTokenInvalid,
                 "authorization: expected a token that this server knows, got another");
}

absl::StatusOr<std::string> Authenticator::Identify(const grpc::ServerContextBase& context,
                                                    absl::string_view peer) const {
  if (!entries()->empty()) {
    auto header = context.client_metadata().find("authorization");
    return CheckToken(header == context.client_metadata().end() ? "" : View(header->second));
  }
  std::shared_ptr<const grpc::AuthContext> auth = context.auth_context();
  if (auth != nullptr && auth->IsPeerAuthenticated()) {
    std::vector<grpc::string_ref> names = auth->GetPeerIdentity();
    if (!names.empty()) return std::string(View(names.front()));
  }
  return CallerOfPeer(peer);
}

absl::StatusOr<std::string> Authenticator::IdentifyLocal(absl::string_view header) const {
  if (!entries()->empty()) return CheckToken(header);
  return CallerOfPeer("unix:");
}

std::string TokenFileExposure(const std::string& path) {
  struct stat what {};
  if (stat(path.c_str(), &what) != 0 || (what.st_mode & S_IROTH) == 0) return "";
  return absl::StrCat("--token_file: every user of this host can read ", path,
                      "; take that right away (chmod o-r)");
}

std::string CallerOfPeer(absl::string_view peer) {
  if (absl::StartsWith(peer, "unix")) return "unix";
  absl::string_view address = peer.substr(peer.find(':') + 1);
  return std::string(address.substr(0, address.rfind(':')));
}

}  // namespace attnd
