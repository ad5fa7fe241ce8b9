#include "server/wire/decode_problem.h"

#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/mask_plans.h"
#include "attention/problem.h"
#include "base/status_macros.h"
#include "proto/attnd/v1/mask_codec.h"
#include "proto/attnd/v1/mask_data.h"
#include "proto/attnd/v1/problem_codec.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

// A mask up to this is checked in microseconds.
constexpr size_t kSmallMaskBytes = 4096;

// Sets `takes_long` if the mask has to be compiled off the thread that took the call.
absl::Status LeaveItWhereItTakesLong(const CallersMasks& masks) {
  if (masks.takes_long == nullptr) return absl::OkStatus();
  *masks.takes_long = true;
  return absl::CancelledError();
}

absl::Status RefuseBesideId(const v1::MaskSpec& wire) {
  const bool alone = wire.pattern().empty() && wire.pattern_of().empty() && !wire.has_extents() &&
                     wire.empty_row() == v1::EMPTY_ROW_ZERO;
  if (alone) return absl::OkStatus();
  return FieldError(reason::kBadField, "problem.mask.id", "nothing but origin beside it", "more");
}

// Counts the bytes of the mask's lists outside of it, within the limit; they may lie anywhere yet.
absl::StatusOr<int64_t> CheckMaskData(const v1::MaskSpec& wire, const CallersMasks& masks) {
  const absl::StatusOr<int64_t> bytes = MaskDataBytes(wire);
  if (!bytes.ok()) return Classified(bytes.status());
  const int64_t most = masks.table.limits().bytes_of_caller;
  if (*bytes <= most) return *bytes;
  const std::string expected =
      absl::StrCat("at most ", most, " bytes (a quarter of --mask_memory_mib)");
  const std::string got = absl::StrCat(*bytes);
  return Failure(absl::StatusCode::kOutOfRange, reason::kMaskTooLarge,
                 absl::StrCat("mask_data: expected ", expected, ", got ", got),
                 {{"field", "mask_data"},
                  {"expected", expected},
                  {"got", got},
                  {"limit", absl::StrCat(most)}});
}

// Whether they come in chunks behind this header, and have not yet.
bool FollowsLater(int64_t data_bytes, const CallersMasks& masks) {
  return data_bytes > 0 && masks.streamed != nullptr && masks.streamed->bytes.empty();
}

absl::Status TakeMask(const v1::MaskSpec& wire, const CallersMasks& masks,
                      ReadMaskData read_mask_data, DecodedProblem& decoded) {
  ASSIGN_OR_RETURN(const int64_t data_bytes, CheckMaskData(wire, masks));
  decoded.mask_data_bytes = data_bytes;
  const bool is_small = wire.ByteSizeLong() + static_cast<size_t>(data_bytes) <= kSmallMaskBytes;
  if (!is_small && !FollowsLater(data_bytes, masks)) {
    RETURN_IF_ERROR(LeaveItWhereItTakesLong(masks));
  }
  std::string data;
  if (data_bytes > 0) {
    ASSIGN_OR_RETURN(data, read_mask_data(data_bytes));
  }
  absl::StatusOr<MaskSpec> spec = DecodeMask(wire, data);
  if (!spec.ok()) return Classified(spec.status());
  auto kept = masks.table.Keep(*spec, MaskCallOf(decoded.problem), masks.caller);
  if (!kept.ok()) return Classified(kept.status());
  decoded.problem.mask = *std::move(kept);
  return absl::OkStatus();
}

// Last: a mask is checked against the sizes and options of the rest.
absl::Status DecodeMaskIn(const v1::Problem& wire, const CallersMasks& masks,
                          ReadMaskData read_mask_data, DecodedProblem& decoded) {
  if (!wire.has_mask()) return absl::OkStatus();
  const v1::MaskSpec& mask = wire.mask();
  Problem& p = decoded.problem;
  p.mask_origin = DecodeMaskOrigin(mask);
  if (mask.id().empty()) {
    RETURN_IF_ERROR(TakeMask(mask, masks, read_mask_data, decoded));
  } else {
    RETURN_IF_ERROR(RefuseBesideId(mask));
    ASSIGN_OR_RETURN(p.mask, masks.table.Find(mask.id(), masks.caller, !masks.is_repeated));
  }
  RETURN_IF_ERROR(Classified(Validate(p)));
  return PlanMask(masks, decoded);
}

}  // namespace

absl::Status PlanMask(const CallersMasks& masks, DecodedProblem& decoded) {
  Problem& p = decoded.problem;
  if (p.mask == nullptr) return absl::OkStatus();
  const bool rejects_empty_rows = p.mask->spec().empty_row == EmptyRow::kReject;
  MaskPlans& plans = masks.table.plans();
  decoded.plan = plans.Find(p, HostMaskOptions());
  if (decoded.plan == nullptr || rejects_empty_rows) {
    RETURN_IF_ERROR(LeaveItWhereItTakesLong(masks));
    auto plan = plans.Get(p, HostMaskOptions());
    if (!plan.ok()) return Classified(plan.status());
    decoded.plan = *std::move(plan);
  }
  p.mask_share = VisitedShare(*decoded.plan, p);
  if (!rejects_empty_rows) return absl::OkStatus();
  const absl::Status empty = CheckEmptyRows(*decoded.plan, p);
  if (!absl::IsInvalidArgument(empty)) return Classified(empty);
  return Failure(empty.code(), reason::kEmptyRow, empty.message(),
                 {{"field", "problem.mask.empty_row"}});
}

absl::Status RefuseMaskData(int64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  return FieldError(reason::kSizeMismatch, "mask_data", "none without lists of problem.mask there",
                    absl::StrCat(bytes, " bytes"));
}

absl::StatusOr<DecodedProblem> DecodeProblem(const v1::Problem& wire, const CallersMasks& masks,
                                             ReadMaskData read_mask_data) {
  absl::StatusOr<Problem> fields = DecodeProblemFields(wire);
  if (!fields.ok()) return Classified(fields.status());
  RETURN_IF_ERROR(Classified(Validate(*fields)));
  DecodedProblem decoded{.problem = *std::move(fields)};
  RETURN_IF_ERROR(DecodeMaskIn(wire, masks, read_mask_data, decoded));
  return decoded;
}

}  // namespace attnd
