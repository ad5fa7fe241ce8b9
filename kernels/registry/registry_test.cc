#include "kernels/registry/registry.h"

#include <dlfcn.h>

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace attnd {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(Registry, MakesTheEnginesThatNeedNoDevice) {
  for (const char* name : {"cpu", "reference"}) {
    std::string note = "old";
    auto backend = MakeBackend(name, {.cpu_threads = 1}, &note);
    ASSERT_TRUE(backend.ok()) << backend.status();
    EXPECT_EQ((*backend)->info().backend, name);
    EXPECT_THAT(note, IsEmpty());
  }
}

TEST(Registry, RefusesNamesThatAreNotInTheList) {
  auto backend = MakeBackend("gpu", {});
  EXPECT_EQ(backend.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(backend.status().message()),
              HasSubstr("backend: expected auto, cpu, cuda or reference, got gpu"));
}

TEST(Registry, FallsBackToTheCpuAndSaysWhyWhenNoGpuIsUsable) {
  std::string note;
  auto cuda = MakeBackend("cuda", {});
  auto backend = MakeBackend("auto", {.cpu_threads = 1}, &note);
  ASSERT_TRUE(backend.ok()) << backend.status();
  if (cuda.ok()) {  // on a machine with a GPU
    bool volta = (*cuda)->info().architecture == "sm_70";
    EXPECT_EQ((*backend)->info().backend, volta ? "cuda" : "cpu");
    EXPECT_EQ(note.empty(), volta) << note;
    return;
  }
  EXPECT_EQ(cuda.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ((*backend)->info().backend, "cpu");
  EXPECT_EQ(note, "cpu engine: " + std::string(cuda.status().message()));
}

}  // namespace
}  // namespace attnd
