#include "proto/attnd/v1/mask_data.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/round_up.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

constexpr int64_t kBeyondAllLimits = int64_t{1} << 60;
constexpr uint64_t kMaxCount = uint64_t{1} << 40;

absl::Status BadField(absl::string_view field, absl::string_view expected, absl::string_view got) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": expected ", expected, ", got ", got));
}

// Walks through the messages of a mask in the order of their fields and adds up its lists.
class Sizes {
 public:
  absl::Status Walk(const Message& message, const std::string& path) {
    if (message.GetDescriptor() == v1::MaskArray::descriptor()) {
      return Array(static_cast<const v1::MaskArray&>(message), path);
    }
    if (message.GetDescriptor() == v1::Rectangles::descriptor()) return absl::OkStatus();
    const auto& reflection = *message.GetReflection();
    std::vector<const FieldDescriptor*> fields;
    reflection.ListFields(message, &fields);
    for (const FieldDescriptor* field : fields) {
      if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) continue;
      const std::string inner = absl::StrCat(path, ".", field->name());
      if (!field->is_repeated()) {
        RETURN_IF_ERROR(Walk(reflection.GetMessage(message, field), inner));
        continue;
      }
      for (int n = 0; n < reflection.FieldSize(message, field); ++n) {
        RETURN_IF_ERROR(Walk(reflection.GetRepeatedMessage(message, field, n),
                             absl::StrCat(inner, "[", n, "]")));
      }
    }
    return Bytes(message, path);
  }

  absl::StatusOr<int64_t> Total(const std::string& path) const {
    if (inline_numbers_ <= kMaxInlineMaskNumbers) return total_;
    return BadField(path,
                    absl::StrCat("at most ", kMaxInlineMaskNumbers,
                                 " numbers as `value` of its lists, more in mask_data"),
                    absl::StrCat(inline_numbers_));
  }

 private:
  absl::Status Array(const v1::MaskArray& array, const std::string& path) {
    inline_numbers_ += array.value_size();
    if (array.count() == 0) return absl::OkStatus();
    const uint32_t width = array.entry_bytes();
    if (width != 1 && width != 2 && width != 4) {
      return BadField(path + ".entry_bytes", "1, 2 or 4", absl::StrCat(width));
    }
    const bool given = array.value_size() > 0 || !array.data().empty();
    return Add(array.count(), width, given, path + ".count");
  }

  // The lists of bytes, whose numbers are higher than those of all messages beside them.
  absl::Status Bytes(const Message& message, const std::string& path) {
    if (message.GetDescriptor() == v1::BlockList::descriptor()) {
      const auto& blocks = static_cast<const v1::BlockList&>(message);
      RETURN_IF_ERROR(Add(blocks.kind_bytes(), 1, !blocks.kind().empty(), path + ".kind_bytes"));
      return Add(blocks.bitmaps_bytes(), 1, !blocks.bitmaps().empty(), path + ".bitmaps_bytes");
    }
    if (message.GetDescriptor() == v1::Bitmap::descriptor()) {
      const auto& bits = static_cast<const v1::Bitmap&>(message);
      return Add(bits.data_bytes(), 1, !bits.data().empty(), path + ".data_bytes");
    }
    return absl::OkStatus();
  }

  absl::Status Add(uint64_t count, uint32_t width, bool is_given_inside, const std::string& path) {
    if (count == 0) return absl::OkStatus();
    if (is_given_inside) return BadField(path, "a list inside the mask or in mask_data", "both");
    if (count > kMaxCount || total_ >= kBeyondAllLimits) {
      total_ = kBeyondAllLimits;
    } else {
      total_ = RoundUp(total_, kMaskDataAlignment) + static_cast<int64_t>(count * width);
    }
    return absl::OkStatus();
  }

  int64_t total_ = 0, inline_numbers_ = 0;
};

}  // namespace

absl::StatusOr<int64_t> MaskDataBytes(const v1::MaskSpec& wire) {
  const std::string path = "problem.mask";
  Sizes sizes;
  RETURN_IF_ERROR(sizes.Walk(wire, path));
  return sizes.Total(path);
}

std::vector<uint32_t> NumbersOf(absl::string_view bytes, size_t width) {
  std::vector<uint32_t> numbers(bytes.size() / width);
  const auto* at = reinterpret_cast<const uint8_t*>(bytes.data());
  for (uint32_t& number : numbers) {
    number = 0;
    for (size_t n = 0; n < width; ++n) number |= uint32_t{*at++} << (8 * n);
  }
  return numbers;
}

absl::string_view MaskDataReader::Next(uint64_t bytes) {
  const auto begin = std::min(static_cast<size_t>(RoundUp(at_, kMaskDataAlignment)), data_.size());
  const absl::string_view list = data_.substr(begin, bytes);
  at_ = static_cast<int64_t>(begin + list.size());
  return list;
}

void MaskDataWriter::Add(absl::string_view bytes) {
  data_.resize(
      static_cast<size_t>(RoundUp(static_cast<int64_t>(data_.size()), kMaskDataAlignment)));
  data_.append(bytes.data(), bytes.size());
}

}  // namespace attnd
