// A call's tensors as data: which there are, how large each one is, and where its bytes lie. The
// decoder of a method makes the list; admission, landing, chunks, shared memory, leases and encode
// work on any list. Only the decoder and the engine call know what the ids mean.
// Values; any thread may read one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/strings/string_view.h"

namespace attnd {

enum class TensorUse : uint8_t {
  kInput,   // the caller brings it
  kKept,    // it lies in the residual that the call names
  kOutput,  // the engine writes it
};

// Without a region the tensor is a payload of the message, of chunks or of the reply.
inline constexpr int kNoRegion = -1;

struct TensorSpec {
  int id = 0;              // the same in every call
  int field = 0;           // of the request message; of an output: of the reply
  absl::string_view name;  // for errors; static
  TensorUse role = TensorUse::kInput;
  bool wanted = true;      // false: an output that the engine writes and the caller did not ask for
  int region = kNoRegion;  // of the call's SharedRequest
  int64_t bytes = 0;
  uint64_t offset = 0;  // in the message or the region
};

// In the order in which inputs, then outputs, travel and lie in memory. A usual call fits inline.
using TensorList = absl::InlinedVector<TensorSpec, 9>;

// Where tensors of a call lie, by id. A list: a call has few.
class TensorPlaces {
 public:
  void Reserve(size_t count) { places_.reserve(count); }
  void Add(int id, std::byte* data) { places_.push_back({id, data}); }
  // Null: not in the list.
  std::byte* operator[](int id) const {
    for (const Place& place : places_) {
      if (place.id == id) return place.data;
    }
    return nullptr;
  }

 private:
  struct Place {
    int id;
    std::byte* data;
  };
  std::vector<Place> places_;
};

}  // namespace attnd
