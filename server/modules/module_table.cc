#include "server/modules/module_table.h"

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "base/stop_wakes.h"
#include "server/call/status_details.h"
#include "server/modules/module_errors.h"

namespace attnd {
namespace {

constexpr size_t kEndsRemembered = 1024;
constexpr absl::Duration kReapEvery = absl::Seconds(1);
// After so long without a look the process has stood still, and nobody could use a module.
constexpr absl::Duration kStoodStill = absl::Seconds(2);

absl::Status Exists(const std::string& name) {
  return Failure(absl::StatusCode::kFailedPrecondition, reason::kModuleExists,
                 absl::StrCat("name: ", name,
                              " is a module of another layout, optimizer or limits; release it, or "
                              "take another name"),
                 {{"name", name}});
}

absl::Status TooMany(int64_t most) {
  return Failure(absl::StatusCode::kResourceExhausted, reason::kModuleQuota,
                 absl::StrCat("max_modules: all ", most,
                              " are registered; release one, or raise --max_modules"),
                 {{"limit", "max_modules"}, {"value", absl::StrCat(most)}});
}

// Activations' tokens name both in one number.
constexpr int kKeptBits = 40;
uint64_t ActivationNumber(uint64_t module, uint64_t kept) { return module << kKeptBits | kept; }

}  // namespace

ModuleTable::ModuleTable(const ModuleOptions& options, const TokenIssuer& issuer,
                         const Clock& clock)
    : options_(options),
      clock_(clock),
      memory_(options.memory),
      tokens_(issuer, "Register"),
      activation_tokens_(issuer),
      looked_at_(SteadyNow()),
      expires_(kReapEvery, [this] { Expire(); }) {}

absl::Status ModuleTable::BeginRegistration(const Key& key, const CallWait& wait) {
  const StopWakes wakes(wait.stop, mutex_);
  absl::MutexLock lock(&mutex_);
  auto over = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return !registering_.contains(key) || wait.stop.stop_requested();
  };
  const bool in_time = mutex_.AwaitWithTimeout(absl::Condition(&over), wait.deadline - SteadyNow());
  if (!in_time || wait.stop.stop_requested()) return wait.Stopped();
  registering_.insert(key);
  return absl::OkStatus();
}

void ModuleTable::EndRegistration(const Key& key) {
  absl::MutexLock lock(&mutex_);
  registering_.erase(key);
}

absl::StatusOr<std::shared_ptr<RegisteredModule>> ModuleTable::Register(const Registration& wanted,
                                                                        const Make& make) {
  const Key key(wanted.caller, wanted.name);
  RETURN_IF_ERROR(BeginRegistration(key, wanted.wait));
  const absl::Cleanup end = [&] { EndRegistration(key); };
  Entry there, failed;
  uint64_t id = 0;
  {
    absl::MutexLock lock(&mutex_);
    auto found = by_name_.find(key);
    if (found != by_name_.end() && !found->second->CheckSequence(std::nullopt).ok()) {
      failed = End(found->second, "failed");
      found = by_name_.end();
    }
    if (found != by_name_.end()) {
      there = found->second;
    } else if (static_cast<int64_t>(by_id_.size()) + making_ >= options_.max_modules) {
      return TooMany(options_.max_modules);
    } else {
      id = next_id_++;
      ++making_;
    }
  }
  if (there != nullptr) return Take(there, wanted);
  failed.reset();  // its memory and its state's lock are free for the new one
  absl::StatusOr<Entry> module = make(id);
  if (module.ok()) (*module)->Share(early_places_);
  if (module.ok()) (*module)->Touch(clock_.Now(), wanted.ttl);
  absl::MutexLock lock(&mutex_);
  --making_;
  if (module.ok()) by_name_[key] = by_id_[id] = *module;
  return module;
}

absl::StatusOr<std::shared_ptr<RegisteredModule>> ModuleTable::Take(const Entry& found,
                                                                    const Registration& wanted) {
  const ModuleRecord& record = found->record();
  const uint64_t epoch = wanted.owner_epoch == 0 ? record.owner_epoch : wanted.owner_epoch;
  if (record.digest != wanted.digest) return Exists(wanted.name);
  if (epoch < record.owner_epoch) return ModuleTaken(wanted.name, record.owner_epoch, epoch);
  if (epoch == record.owner_epoch) {
    found->Touch(clock_.Now(), wanted.ttl);
    return found;
  }
  uint64_t id = 0;
  {
    absl::MutexLock lock(&mutex_);
    id = next_id_++;
  }
  ASSIGN_OR_RETURN(std::shared_ptr<RegisteredModule> taken,
                   found->TakeOver(id, epoch, wanted.wait));
  taken->Touch(clock_.Now(), wanted.ttl);
  absl::MutexLock lock(&mutex_);
  End(found, kTaken);
  by_name_[{wanted.caller, wanted.name}] = by_id_[id] = taken;
  return taken;
}

absl::StatusOr<std::shared_ptr<RegisteredModule>> ModuleTable::Find(const std::string& token,
                                                                    const std::string& caller) {
  absl::StatusOr<uint64_t> id = tokens_.Check(token, caller);
  if (!id.ok()) return OfModuleToken(id.status());
  absl::MutexLock lock(&mutex_);
  auto found = by_id_.find(*id);
  if (found != by_id_.end()) {
    found->second->Touch(clock_.Now());
    return found->second;
  }
  for (const auto& [ended, cause] : ended_) {
    if (ended == *id) return ModuleLost(cause);
  }
  return ModuleLost("unknown");
}

bool ModuleTable::FinishesStep(const std::string& token, const std::string& caller) {
  const absl::StatusOr<uint64_t> id = tokens_.Check(token, caller);
  absl::MutexLock lock(&mutex_);
  const auto found = id.ok() ? by_id_.find(*id) : by_id_.end();
  return found != by_id_.end() && found->second->FinishesStep();
}

absl::StatusOr<std::shared_ptr<RegisteredModule>> ModuleTable::FindByName(const std::string& caller,
                                                                          const std::string& name) {
  absl::MutexLock lock(&mutex_);
  auto found = by_name_.find({caller, name});
  if (found == by_name_.end()) return ModuleLost("unknown");
  found->second->Touch(clock_.Now());
  return found->second;
}

absl::Status ModuleTable::Release(const std::string& token, const std::string& caller) {
  absl::StatusOr<uint64_t> id = tokens_.Check(token, caller);
  if (!id.ok()) return OfModuleToken(id.status());
  Entry released;
  absl::MutexLock lock(&mutex_);
  auto found = by_id_.find(*id);
  if (found != by_id_.end()) released = End(found->second, "released");
  return absl::OkStatus();
}

std::shared_ptr<RegisteredModule> ModuleTable::End(Entry module, const std::string& cause) {
  module->Lose(cause);
  const ModuleRecord& record = module->record();
  by_name_.erase({record.caller, record.name});
  by_id_.erase(record.id);
  ended_.emplace_back(record.id, cause);
  if (ended_.size() > kEndsRemembered) ended_.pop_front();
  return module;
}

// Saving takes as long as a disk does, so it holds no lock of the table.
void ModuleTable::Expire() {
  const absl::Time now = clock_.Now();
  const absl::Duration since = SinceLook();
  for (const auto& module : All()) {
    if (since > kStoodStill) module->Prolong(since);
    const bool is_over = module->Expire(now);
    module->SaveIfDue(now, is_over);
  }
  std::vector<Entry> over;
  absl::MutexLock lock(&mutex_);
  for (const auto& [id, module] : by_id_) {
    if (module->Expire(now)) over.push_back(module);
  }
  for (const Entry& module : over) End(module, kExpired);
}

absl::Duration ModuleTable::SinceLook() {
  absl::MutexLock lock(&mutex_);
  const absl::Time now = SteadyNow();
  return now - std::exchange(looked_at_, now);
}

void ModuleTable::SaveAll() {
  for (const auto& module : All()) module->SaveIfDue(clock_.Now(), true);
}

std::vector<std::shared_ptr<RegisteredModule>> ModuleTable::All() const {
  std::vector<std::shared_ptr<RegisteredModule>> all;
  absl::MutexLock lock(&mutex_);
  for (const auto& [id, module] : by_id_) all.push_back(module);
  return all;
}

uint64_t ModuleTable::durable_lag() const {
  uint64_t most = 0;
  for (const auto& module : All()) most = std::max(most, module->durable_lag());
  return most;
}

bool ModuleTable::AnyUsedWithin(absl::Duration time) const {
  const absl::Time since = clock_.Now() - time;
  for (const auto& module : All()) {
    if (module->used_at() >= since) return true;
  }
  return false;
}

std::vector<std::shared_ptr<RegisteredModule>> ModuleTable::Of(const std::string& caller) const {
  std::vector<std::shared_ptr<RegisteredModule>> of;
  absl::MutexLock lock(&mutex_);
  for (auto at = by_name_.lower_bound({caller, ""}); at != by_name_.end(); ++at) {
    if (at->first.first != caller) break;
    of.push_back(at->second);
  }
  return of;
}

std::string ModuleTable::TokenOf(const RegisteredModule& module) const {
  return tokens_.Make(module.record().id, module.record().caller);
}

std::string ModuleTable::ActivationToken(const RegisteredModule& module, uint64_t kept) const {
  return activation_tokens_.Make(ActivationNumber(module.record().id, kept),
                                 module.record().caller);
}

absl::StatusOr<uint64_t> ModuleTable::CheckActivation(const std::string& token,
                                                      const RegisteredModule& module) const {
  absl::StatusOr<uint64_t> number = activation_tokens_.Check(token, module.record().caller);
  if (!number.ok()) return RenameField(number.status(), "residual_token", "activations");
  if (*number >> kKeptBits == module.record().id) return *number & ((uint64_t{1} << kKeptBits) - 1);
  return RenameField(LeaseLost("of another module"), "residual_token", "activations");
}

int64_t ModuleTable::size() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int64_t>(by_id_.size());
}

ModuleTable::Bytes ModuleTable::UsedBytes(int device) const {
  Bytes bytes;
  int64_t planned = 0;
  for (const std::shared_ptr<RegisteredModule>& module : All()) {
    planned += module->plan().device_bytes();
    for (const EnginePlan& part : module->plan().parts()) {
      if (part.device != device) continue;
      bytes.weights += part.plan.weight_bytes;
      bytes.optimizers += part.plan.optimizer_bytes;
      bytes.activations += part.plan.activation_bytes;
      bytes.workspaces += part.plan.workspace_bytes + part.engine_bytes;
    }
  }
  if (device == 0) bytes.others = std::max<int64_t>(0, memory_.used() - planned);
  return bytes;
}

void ModuleTable::LoseDevice(int device) {
  memory_.LoseDevice(device);
  const std::vector<std::shared_ptr<RegisteredModule>> all = All();
  absl::MutexLock lock(&mutex_);
  for (const std::shared_ptr<RegisteredModule>& module : all) {
    const bool is_there = by_id_.contains(module->record().id);
    if (is_there && module->IsOn(device)) End(module, kDeviceLost);
  }
}

}  // namespace attnd
