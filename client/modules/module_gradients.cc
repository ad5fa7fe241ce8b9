// A RemoteModule, as far as it knows the gradients of its present step.
#include <memory>
#include <utility>

#include "base/status_macros.h"
#include "client/modules/module_errors.h"
#include "client/modules/remote_module.h"

namespace attnd {

absl::Status RemoteModule::Enter(SentBackward& kept) {
  absl::ReaderMutexLock lock(&mutex_);
  absl::MutexLock log_lock(&log_mutex_);
  if (has_failed_) return GradientsUnsure();
  kept.micro_batch = rank_ + ranks_ * micro_batches_++;
  log_.Add(kept);
  return absl::OkStatus();
}

void RemoteModule::Withdraw(const absl::Status& why) {
  absl::MutexLock log_lock(&log_mutex_);
  // A wrong one has not been added: the server misses it, and says so.
  has_failed_ |= !absl::IsInvalidArgument(why);
  log_.ForgetGradients();
}

absl::Status RemoteModule::CheckGradients() const {
  absl::MutexLock log_lock(&log_mutex_);
  return has_failed_ ? GradientsUnsure() : absl::OkStatus();
}

void RemoteModule::ClearGradients() {
  micro_batches_ = 0;
  has_failed_ = false;
}

absl::StatusOr<v1::GradientStatsResponse> RemoteModule::GradientStats(const CallOptions& options,
                                                                      bool by_parameter,
                                                                      bool all_norms) {
  RETURN_IF_ERROR(CheckGradients());
  v1::GradientStatsResponse reply;
  RETURN_IF_ERROR(Persist(options, [&](ModuleTry& attempt) {
    absl::ReaderMutexLock lock(&mutex_);
    v1::GradientStatsRequest request;
    request.set_token(token_);
    request.set_sequence(sequence_);
    request.set_micro_batches(GroupsMicroBatches());
    request.set_by_parameter(by_parameter);
    request.set_all_norms(all_norms);
    return AwaitGroup(attempt, [&] { return rpcs().GradientStats(request, reply, attempt); });
  }));
  return reply;
}

absl::StatusOr<v1::SumGradientsResponse> RemoteModule::SumGradients(v1::SumGradientsRequest request,
                                                                    const CallOptions& options) {
  absl::MutexLock changing(&changing_);
  RETURN_IF_ERROR(CheckGradients());
  v1::SumGradientsResponse reply;
  RETURN_IF_ERROR(Persist(options, [&](ModuleTry& attempt) {
    absl::ReaderMutexLock lock(&mutex_);
    request.set_token(token_);
    request.set_sequence(sequence_);
    request.set_micro_batch(GroupsMicroBatches());
    return rpcs().SumGradients(request, reply, attempt);
  }));
  if (request.group().empty()) return reply;
  absl::MutexLock lock(&mutex_);
  rank_ = 0;
  ranks_ = 1;
  absl::MutexLock log_lock(&log_mutex_);
  micro_batches_ = request.micro_batch() + 1;
  return reply;
}

absl::Status RemoteModule::PutGradients(SentPut given, const CallOptions& options) {
  {
    absl::ReaderMutexLock lock(&mutex_);
    if (ranks_ > 1) {
      return absl::FailedPreconditionError(
          "gradients: expected a module of one process, got one of a group, whose gradients are "
          "the sum of all ranks'");
    }
  }
  SentBackward kept;
  kept.gradients = std::make_shared<const SentPut>(std::move(given));
  RETURN_IF_ERROR(Enter(kept));
  absl::Status done = Persist(options, [&](ModuleTry& attempt) {
    absl::ReaderMutexLock lock(&mutex_);
    return ReplayBackward(rpcs(), token_, sequence_, kept, attempt);
  });
  if (!done.ok()) Withdraw(done);
  return done;
}

}  // namespace attnd
