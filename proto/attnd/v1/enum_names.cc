#include "proto/attnd/v1/enum_names.h"

#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace attnd {

std::string EnumNames(const google::protobuf::EnumDescriptor& type) {
  std::vector<absl::string_view> names;
  for (int n = 0; n < type.value_count(); ++n) {
    const std::string& name = type.value(n)->name();
    if (!absl::EndsWith(name, "_UNSPECIFIED")) names.push_back(name);
  }
  const absl::string_view last = names.back();
  names.pop_back();
  return absl::StrCat(absl::StrJoin(names, ", "), " or ", last);
}

}  // namespace attnd
