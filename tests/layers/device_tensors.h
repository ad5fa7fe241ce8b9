// Tensors in the memory of one GPU, one behind the other. One thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/round_up.h"
#include "kernels/layers/cuda/cuda_device.h"
#include "tests/layers/engine_fixture.h"

namespace attnd {

class DeviceTensors {
 public:
  // Room for so many numbers.
  DeviceTensors(cuda::CudaBackend& engine, int64_t numbers) : device_(engine) {
    const int64_t bytes = (int64_t{16} << 20) + RoundUp(4 * numbers, kTensorAlignment);
    next_ = Value(device_.Allocate(bytes + RoundUp(device_.OwnBytes(), kTensorAlignment)));
  }
  CudaDevice& device() { return device_; }
  Tensor Put(const Numbers& numbers, ElementType element) {
    const Tensor tensor{next_, element};
    Set(tensor, numbers);
    const auto count = static_cast<int64_t>(numbers.size());
    next_ += RoundUp(count * ElementBytes(element), kTensorAlignment);
    return tensor;
  }
  void Set(const Tensor& tensor, const Numbers& numbers) {
    const Bytes bytes = BytesOf(numbers, tensor.element);
    CheckOk(
        device_.Put(tensor.element, bytes.data(), tensor, static_cast<int64_t>(numbers.size())));
  }
  Numbers Get(const Tensor& tensor, int64_t count) {
    Bytes bytes(count * ElementBytes(tensor.element));
    CheckOk(device_.Get(tensor, tensor.element, bytes.data(), count));
    CheckOk(device_.Finish());
    return NumbersOf(bytes, tensor.element);
  }

 private:
  CudaDevice device_;
  std::byte* next_;
};

}  // namespace attnd
