#include "server/keep/lease_token.h"

#include <gtest/gtest.h>

#include "server/call/status_details.h"

namespace attnd {
namespace {

TEST(LeaseTokens, OpenTheirOwnLease) {
  LeaseTokens tokens({1, 7});
  for (uint64_t lease : {uint64_t{1}, uint64_t{1} << 40, ~uint64_t{0}}) {
    std::string token = tokens.Make(lease, "alice");
    EXPECT_EQ(token.size(), kLeaseTokenBytes);
    absl::StatusOr<uint64_t> found = tokens.Check(token, "alice");
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(*found, lease);
  }
}

TEST(LeaseTokens, AreRefusedFromAnotherOwner) {
  LeaseTokens tokens({1, 7});
  absl::Status status = tokens.Check(tokens.Make(1, "alice"), "bob").status();
  EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
  EXPECT_EQ(ReasonOf(status), reason::kLeaseNotOwned);
}

TEST(LeaseTokens, AreRefusedWhenAnyBitIsChanged) {
  LeaseTokens tokens({1, 7});
  std::string token = tokens.Make(1, "alice");
  for (size_t bit = 0; bit < 8 * token.size(); ++bit) {
    std::string forged = token;
    forged[bit / 8] = static_cast<char>(forged[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_FALSE(tokens.Check(forged, "alice").ok()) << "bit " << bit;
  }
}

TEST(LeaseTokens, AreRefusedWhenMadeWithAnotherKeyOfTheSameEpoch) {
  LeaseTokens tokens({1, 7}), forger({1, 7});
  absl::Status status = tokens.Check(forger.Make(1, "alice"), "alice").status();
  EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
}

TEST(LeaseTokens, AreKnownToBeOfAnotherStartOrReplica) {
  LeaseTokens tokens({1, 7}), earlier({1, 6}), other({2, 7});
  absl::Status status = tokens.Check(earlier.Make(1, "alice"), "alice").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_EQ(ReasonOf(status), reason::kEpochChanged);
  status = tokens.Check(other.Make(1, "alice"), "alice").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_EQ(ReasonOf(status), reason::kWrongReplica);
}

TEST(LeaseTokens, OfTheFirstVersionAreOfAnEarlierStart) {
  LeaseTokens tokens({1, 7});
  std::string first(57, 'x');
  first[0] = 1;
  EXPECT_EQ(ReasonOf(tokens.Check(first, "alice").status()), reason::kEpochChanged);
}

TEST(LeaseTokens, NeedTheirLengthAndVersion) {
  LeaseTokens tokens({1, 7});
  std::string token = tokens.Make(1, "alice");
  std::string version = token;
  version[0] = 3;
  for (const std::string& bad : {std::string(), token.substr(1), token + "x", version}) {
    absl::Status status = tokens.Check(bad, "alice").status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_EQ(ReasonOf(status), reason::kBadField);
  }
}

}  // namespace
}  // namespace attnd
