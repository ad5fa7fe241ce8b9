// Writes the fuzzer's seeds: one small valid request per kind of problem, in both directions.
//   bazel run //tests/fuzz:make_decode_corpus -- $PWD/tests/fuzz/decode_corpus
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "attention/random_problem.h"
#include "tests/fixtures/wire_request.h"

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
}
