// Joins pointwise launches of a segment into one: each launch's descriptor is a step, and what one
// writes and another reads passes in registers. What does not join runs launch by launch, to the
// same bits. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "absl/types/span.h"
#include "attention/element.h"
#include "kernels/dense/dense_params.h"

namespace attnd {

// One launch of a kernel over single numbers takes so many at most.
inline constexpr int64_t kMostNumbers = int64_t{1} << 30;

using ChainLink = std::variant<NumbersDesc, NormDesc>;

// A launch of ChainKernel, or of NormKernel with what goes before and behind. The descriptors' own
// lists of steps are the caller's to set.
struct JoinedChain {
  ChainDesc chain = {};
  std::optional<NormDesc> norm;
  std::vector<NumbersStep> before, after;  // of a norm; without one all steps are before
};

// `unread`: data of tensors that need not be written. nullopt: the links are no chain of tensors of
// one shape, have more steps or numbers than a launch takes, or write where a step before has
// read.
std::optional<JoinedChain> JoinLinks(std::vector<ChainLink> links,
                                     absl::Span<const void* const> unread);

// Has a product on tensor cores compute the link behind it too, a curve of C or C times the slope
// of one; false: it cannot, and stays as it is.
bool JoinCurve(absl::Span<const ChainLink> links, absl::Span<const void* const> unread,
               ElementType operand, ProductDesc& product);

}  // namespace attnd
