#include "server/call/status_details.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "proto/google/rpc/error_details.pb.h"
#include "proto/google/rpc/status.pb.h"

namespace attnd {
namespace {

google::rpc::Status Details(const grpc::Status& status) {
  google::rpc::Status details;
  EXPECT_TRUE(details.ParseFromString(status.error_details()));
  return details;
}

template <class Message>
Message Find(const grpc::Status& status) {
  Message found;
  google::rpc::Status details = Details(status);
  for (const auto& detail : details.details()) {
    if (detail.Is<Message>()) detail.UnpackTo(&found);
  }
  return found;
}

TEST(StatusDetails, GivesNothingForOk) {
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).error_details().empty());
}

TEST(StatusDetails, RepeatsFieldExpectedAndGot) {
  grpc::Status status = ToGrpcStatus(FieldError(reason::kBadShape, "q", "4 bytes", "5 bytes"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "q: expected 4 bytes, got 5 bytes");
  auto info = Find<google::rpc::ErrorInfo>(status);
  EXPECT_EQ(info.reason(), "BAD_SHAPE");
  EXPECT_EQ(info.domain(), "attnd");
  EXPECT_EQ(info.metadata().at("field"), "q");
  EXPECT_EQ(info.metadata().at("expected"), "4 bytes");
  EXPECT_EQ(info.metadata().at("got"), "5 bytes");
  auto bad = Find<google::rpc::BadRequest>(status);
  ASSERT_EQ(bad.field_violations_size(), 1);
  EXPECT_EQ(bad.field_violations(0).field(), "q");
}

TEST(StatusDetails, ReadsFieldExpectedAndGotFromAMessage) {
  grpc::Status status = ToGrpcStatus(absl::InvalidArgumentError(
      "problem.alibi.slope: expected q_heads = 2 or batch·q_heads = 4 entries, got 3"));
  auto info = Find<google::rpc::ErrorInfo>(status);
  EXPECT_EQ(info.reason(), "BAD_SHAPE");
  EXPECT_EQ(info.metadata().at("field"), "problem.alibi.slope");
  EXPECT_EQ(info.metadata().at("got"), "3");
}

TEST(StatusDetails, ChoosesAReasonForEveryCode) {
  for (int code = 1; code <= 16; ++code) {
    absl::Status status(static_cast<absl::StatusCode>(code), "something went wrong");
    EXPECT_FALSE(ReasonOf(Classified(status)).empty()) << code;
    EXPECT_EQ(Details(ToGrpcStatus(status)).code(), code);
  }
  EXPECT_EQ(ReasonOf(Classified(absl::InvalidArgumentError("problem.element: expected a, got b"))),
            reason::kBadDtype);
  EXPECT_EQ(ReasonOf(Classified(absl::UnimplementedError("problem.bias: no"))),
            reason::kProblemUnsupported);
  EXPECT_EQ(ReasonOf(Classified(absl::UnimplementedError("problem.mask: no"))),
            reason::kMaskUnsupported);
  EXPECT_EQ(ReasonOf(Classified(absl::OutOfRangeError("problem.mask.pattern[0]: too long"))),
            reason::kMaskTooComplex);
}

TEST(StatusDetails, KeepsAReasonThatIsThere) {
  absl::Status status = Failure(absl::StatusCode::kUnavailable, reason::kQueueFull, "full");
  EXPECT_EQ(ReasonOf(Classified(status)), reason::kQueueFull);
}

TEST(StatusDetails, CarriesTheRetryDelay) {
  absl::Status status =
      WithRetryAfter(Failure(absl::StatusCode::kUnavailable, reason::kQueueFull, "full"),
                     absl::Milliseconds(1250));
  EXPECT_EQ(RetryAfterOf(status), absl::Milliseconds(1250));
  auto retry = Find<google::rpc::RetryInfo>(ToGrpcStatus(status));
  EXPECT_EQ(retry.retry_delay().seconds(), 1);
  EXPECT_EQ(retry.retry_delay().nanos(), 250000000);
  EXPECT_FALSE(RetryAfterOf(absl::UnavailableError("x")).has_value());
}

TEST(StatusDetails, NamesWhatIsGoneInAPreconditionFailure) {
  for (const char* field : {"residual_token", "shared_memory"}) {
    grpc::Status status = ToGrpcStatus(Failure(absl::StatusCode::kFailedPrecondition, "GONE",
                                               absl::StrCat(field, ": gone; send the tensors")));
    auto failure = Find<google::rpc::PreconditionFailure>(status);
    ASSERT_EQ(failure.violations_size(), 1);
    EXPECT_EQ(failure.violations(0).subject(), field);
    EXPECT_EQ(failure.violations(0).type(), "GONE");
  }
}

TEST(StatusDetails, TakesNoDriverCallForAField) {
  const absl::Status failed = absl::InternalError("cuLaunchKernel: CUDA_ERROR_ILLEGAL_ADDRESS");
  const auto info = Find<google::rpc::ErrorInfo>(ToGrpcStatus(failed));
  EXPECT_EQ(info.reason(), "ENGINE_FAILED");
  EXPECT_FALSE(info.metadata().contains("field"));
}

TEST(StatusDetails, RenamesAFieldInTextAndMetadata) {
  const absl::Status renamed = RenameField(
      FieldError("BAD_FIELD", "residual_token", "a token", "none"), "residual_token", "tokens[2]");
  EXPECT_EQ(renamed.message(), "tokens[2]: expected a token, got none");
  EXPECT_EQ(ReasonOf(renamed), "BAD_FIELD");
  const auto info = Find<google::rpc::ErrorInfo>(ToGrpcStatus(renamed));
  EXPECT_EQ(info.metadata().at("field"), "tokens[2]");
  const absl::Status other = RenameField(FieldError("BAD_FIELD", "q", "a", "b"), "k", "v");
  EXPECT_EQ(other.message(), "q: expected a, got b");
}

TEST(StatusDetails, NamesTheCallerWhoseQuotaIsUsedUp) {
  grpc::Status status = ToGrpcStatus(Failure(absl::StatusCode::kResourceExhausted,
                                             reason::kTenantQuota, "quota", {{"caller", "bob"}}));
  EXPECT_EQ(Find<google::rpc::QuotaFailure>(status).violations(0).subject(), "bob");
}

}  // namespace
}  // namespace attnd
