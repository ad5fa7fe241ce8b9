// The names of an enum's values, for error texts. Any thread.
#pragma once

#include <google/protobuf/descriptor.h>

#include <string>

namespace attnd {

// The values that may be sent: "ELEMENT_FLOAT16, ELEMENT_BFLOAT16 or ELEMENT_FLOAT32".
std::string EnumNames(const google::protobuf::EnumDescriptor& type);

}  // namespace attnd
