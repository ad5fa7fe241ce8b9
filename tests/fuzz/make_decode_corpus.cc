// Writes the fuzzer's seeds: one small valid request per kind of problem, in both directions.
//   bazel run //tests/fuzz:make_decode_corpus -- $PWD/tests/fuzz/decode_corpus
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/masks/mask_description.h"
#include "attention/random_problem.h"
#include "base/check.h"
#include "proto/attnd/v1/mask_codec.h"
#include "tests/fixtures/wire_request.h"

// A forward whose mask has its lists outside of it.
std::string WithListsOutside(attnd::MaskPattern pattern) {
  attnd::Problem problem = attnd::SmallProblem(8, 1);
  const auto mask = attnd::MaskDescription::Make(
      {.pattern = {std::move(pattern)}, .pattern_of = {0}}, attnd::MaskCallOf(problem));
  CHECK(mask.ok()) << mask.status();
  problem.mask = *mask;
  attnd::v1::ForwardRequest request = attnd::MakeForward(problem, 1);
  attnd::SplitMask split = attnd::EncodeSplitMask(problem.mask->spec());
  CHECK(!split.data.empty());
  *request.mutable_problem()->mutable_mask() = split.spec;
  request.set_mask_data(split.data);
  return request.SerializeAsString();
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  for (uint64_t seed = 0; seed < 32; ++seed) {
    attnd::Problem problem = attnd::RandomProblem(seed, {.max_pairs = 32, .max_head_dim = 4});
    attnd::v1::ForwardRequest forward = attnd::MakeForward(problem, seed);
    attnd::v1::ForwardResponse reply;
    reply.set_o(std::string(
        static_cast<size_t>(problem.OutputElements() * attnd::ElementBytes(problem.element)), 'o'));
    reply.set_lse(std::string(static_cast<size_t>(problem.LseElements() * 4), 'l'));
    attnd::v1::BackwardRequest backward = attnd::MakeBackward(problem, seed, reply);
    char slices = static_cast<char>(seed % 16 * 2);
    std::ofstream(absl::StrCat(argv[1], "/forward_", seed))
        << slices << forward.SerializeAsString();
    std::ofstream(absl::StrCat(argv[1], "/backward_", seed))
        << static_cast<char>(slices | 1) << backward.SerializeAsString();
  }
  const std::vector<uint8_t> bits = {1, 2, 4, 8, 16, 32, 64, 129};
  std::ofstream(absl::StrCat(argv[1], "/mask_bits"))
      << '\6' << WithListsOutside(attnd::MaskBitmap{8, bits});
  std::ofstream(absl::StrCat(argv[1], "/mask_blocks"))
      << '\6'
      << WithListsOutside(attnd::BlockList{.bq = 4,
                                           .bk = 4,
                                           .indptr = {0, 1, 3},
                                           .indices = {1, 0, 1},
                                           .kind = {0, 1, 1},
                                           .bitmaps = {1, 2, 3, 4}});
}
