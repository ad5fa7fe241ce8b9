// Only an emulator sees these defects of the sm70 kernels: accesses of shared memory that nothing
// orders, and bank conflicts of every memory instruction.
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "attention/element.h"
#include "attention/problem.h"
#include "attention/random_problem.h"
#include "base/check.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "tests/conformance/conformance_launch.h"
#include "tests/emulator/device/emulated_device.h"
#include "tests/masks/small_masks.h"

namespace attnd::cuda {
namespace {

// Two rounds of the pipelines' slots and a ragged end, in every direction.
Problem Causal(int64_t head_dim) {
  Problem p;
  p.batch = 1;
  p.q_heads = 2;
  p.kv_heads = 1;
  p.q_len = 150;
  p.kv_len = 170;
  p.qk_head_dim = p.v_head_dim = head_dim;
  p.element = ElementType::kFloat16;
  p.causal = true;
  p.alignment = Alignment::kBottomRight;
  return p;
}

// A window by description has whole and partial tiles; a bool mask of random bits partial ones.
enum class MaskKind { kNone, kDescribed, kBool };
void AddMask(MaskKind kind, Problem& p) {
  if (kind == MaskKind::kBool) p.bool_mask = BoolMask{{1, 1, p.q_len, p.kv_len}};
  if (kind != MaskKind::kDescribed) return;
  SetMask(Window(100, 0), p);
}

absl::Status RunRandom(Backend& backend, const Problem& p) {
  ProblemInputs inputs = RandomInputs(p, 1, Values::kNormal);
  StoreElement(p.element, inputs.d_o.data(), 100 * p.v_head_dim, 6e4);
  return RunBothWays(backend, p, inputs).status();
}

TEST(Hazards, EveryAccessOfSharedMemoryIsOrdered) {
  EmulatedDeviceOptions options;
  options.shared.detect_races = true;
  CudaBackend backend(MakeEmulatedDevice(options));
  for (int64_t head_dim : {32, 64, 96, 128, 256}) {
    for (uint32_t threshold : {0u, 26u}) {
      for (int n = 0; n < 6; ++n) {
        Problem p = Causal(head_dim);
        p.dropout.threshold = threshold;
        if (n % 2 == 1) p.softcap = 20;
        AddMask(static_cast<MaskKind>(n / 2), p);
        absl::Status status = RunRandom(backend, p);
        EXPECT_TRUE(status.ok()) << head_dim << " " << threshold << " " << n << ": " << status;
      }
    }
  }
}

TEST(Hazards, EveryAccessOfSharedMemoryIsOrderedInSmallTiles) {
  EmulatedDeviceOptions options;
  options.shared.detect_races = true;
  CudaBackend backend(MakeEmulatedDevice(options), nullptr, MaskWay::kSmall);
  for (int64_t head_dim : {32, 64, 128}) {
    for (int n = 0; n < 4; ++n) {
      Problem p = Causal(head_dim);
      p.dropout.threshold = n % 2 == 1 ? 26 : 0;
      AddMask(MaskKind::kDescribed, p);
      ProblemInputs inputs = RandomInputs(p, 1, Values::kNormal);
      StoreElement(p.element, inputs.d_o.data(), 100 * head_dim, 6e4);
      if (n / 2 == 1) {
        StoreElement(p.element, inputs.q.data(), 100 * head_dim, INFINITY);
        StoreElement(p.element, inputs.d_o.data(), 70 * head_dim, NAN);
      }
      const absl::Status status = RunBothWays(backend, p, inputs).status();
      EXPECT_TRUE(status.ok()) << head_dim << " " << n << ": " << status;
    }
  }
}

TEST(Hazards, EveryAccessOfSharedMemoryIsOrderedInFloat32) {
  EmulatedDeviceOptions options;
  options.shared.detect_races = true;
  CudaBackend backend(MakeEmulatedDevice(options));
  for (int64_t head_dim : {64, 128}) {
    for (int n = 0; n < 6; ++n) {
      Problem p = Causal(head_dim);
      p.element = ElementType::kFloat32;
      p.dropout.threshold = n % 2 == 1 ? 26 : 0;
      AddMask(static_cast<MaskKind>(n / 2), p);
      ProblemInputs inputs = RandomInputs(p, 1, Values::kNormal);
      StoreElement(p.element, inputs.d_o.data(), 100 * head_dim, 6e4);
      if (n % 2 == 1) {
        StoreElement(p.element, inputs.v.data(), 100 * head_dim, INFINITY);
        StoreElement(p.element, inputs.k.data(), 110 * head_dim, INFINITY);
        StoreElement(p.element, inputs.d_o.data(), 70 * head_dim, NAN);
      }
      const absl::Status status = RunBothWays(backend, p, inputs).status();
      EXPECT_TRUE(status.ok()) << head_dim << " " << n << ": " << status;
    }
  }
}

// Both roles of backward then change tiles that are in use.
TEST(Hazards, AccessesAreOrderedWhereRowsAreNotFinite) {
  EmulatedDeviceOptions options;
  options.shared.detect_races = true;
  CudaBackend backend(MakeEmulatedDevice(options));
  for (int64_t head_dim : {64, 128, 256}) {
    for (int n = 0; n < 4; ++n) {
      Problem p = Causal(head_dim);
      if (n % 2 == 1) p.softcap = 20;
      AddMask(static_cast<MaskKind>(n / 2), p);
      ProblemInputs inputs = RandomInputs(p, 1, Values::kNormal);
      StoreElement(p.element, inputs.q.data(), 100 * head_dim, INFINITY);
      StoreElement(p.element, inputs.d_o.data(), 70 * head_dim, NAN);
      absl::Status status = RunBothWays(backend, p, inputs).status();
      EXPECT_TRUE(status.ok()) << head_dim << " " << n << ": " << status;
    }
  }
}

TEST(Hazards, LoadsOfOperandsHaveNoBankConflicts) {
  std::map<std::string, int64_t> conflicts, instructions;
  EmulatedDeviceOptions options;
  options.shared.count_conflicts = true;
  options.observer = [&](const KernelRow& row, const emulator::LaunchReport& report) {
    for (const emulator::BankReport& bank : report.banks) {
      if (bank.bytes != 16 || bank.access != emulator::Access::kLoad) continue;
      absl::string_view file = bank.site.file_name();
      std::string site = NameOf(row) + " " + std::string(file.substr(file.rfind('/') + 1)) + ":" +
                         std::to_string(bank.site.line());
      conflicts[site] += bank.conflicts;
      instructions[site] += bank.instructions;
    }
  };
  CudaBackend small(MakeEmulatedDevice(options), nullptr, MaskWay::kSmall);
  for (int64_t head_dim : {32, 64, 128}) {
    Problem p = Causal(head_dim);
    AddMask(MaskKind::kDescribed, p);
    ASSERT_TRUE(RunRandom(small, p).ok());
  }
  CudaBackend backend(MakeEmulatedDevice(options));
  for (int64_t head_dim : {32, 64, 96, 128, 256}) {
    for (MaskKind kind : {MaskKind::kNone, MaskKind::kDescribed}) {
      Problem p = Causal(head_dim);
      AddMask(kind, p);
      ASSERT_TRUE(RunRandom(backend, p).ok());
      p.element = ElementType::kFloat32;
      if (head_dim == 64 || head_dim == 128) {
        ASSERT_TRUE(RunRandom(backend, p).ok());
      }
    }
  }
  int64_t loads = 0;
  for (const auto& [site, count] : conflicts) {
    EXPECT_EQ(count, 0) << site << ", of " << instructions[site] << " instructions";
    loads += instructions[site];
  }
  EXPECT_GT(loads, 10000);
}

}  // namespace
}  // namespace attnd::cuda
