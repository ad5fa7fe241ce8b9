#include "server/modules/run_forward.h"

#include <utility>

#include "server/call/status_details.h"
#include "server/modules/module_calls.h"
#include "server/modules/module_errors.h"

namespace attnd {
namespace {

absl::Span<const uint8_t> MaskBits(const Payloads& payloads) {
  const absl::Span<std::byte> bits = payloads[kMaskBitsField];
  return {reinterpret_cast<const uint8_t*>(bits.data()), bits.size()};
}

absl::Status OfForward(absl::Status status, const CallWait& wait) {
  if (status.code() == absl::StatusCode::kUnavailable) return ActivationPressure(status.message());
  if (status.code() == absl::StatusCode::kCancelled) return wait.Stopped();
  return Classified(std::move(status));
}

}  // namespace

std::string ForwardDigest(const v1::ModuleForwardHeader& header) {
  v1::ModuleForwardHeader of;
  *of.mutable_rows() = header.rows();
  of.set_seed(header.seed());
  of.set_offset(header.offset());
  of.set_first_layer(header.first_layer());
  of.set_end_layer(header.end_layer());
  return DigestOf(of);
}

absl::StatusOr<ActivationId> RunForward(RegisteredModule::Hold& hold, const ForwardRun& run,
                                        bool keep, const Payloads& payloads, const CallWait& wait,
                                        DeviceYield& yield) {
  const ModuleForwardCall call{.rows = run.rows,
                               .dropout = run.dropout,
                               .x = payloads[kXField],
                               .memory = payloads[kMemoryField],
                               .mask_bits = MaskBits(payloads),
                               .keep = keep,
                               .layers = run.layers,
                               .y = payloads[kYField],
                               .stop = wait.stop,
                               .yield = &yield,
                               .transfers = run.transfers};
  absl::StatusOr<ActivationId> done = hold.instance().Forward(call);
  while (absl::IsUnavailable(done.status()) && run.makes_room && hold.DropOldest()) {
    done = hold.instance().Forward(call);
  }
  if (!done.ok()) return OfForward(done.status(), wait);
  return done;
}

}  // namespace attnd
