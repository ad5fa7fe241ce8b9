#include "tests/fakes/fake_gpu.h"

#include <algorithm>
#include <cstring>

namespace attnd::fake {
namespace {

// `chunks` of 16 bytes of each row.
void CopyRows(const RowTensor& from, const RowTensor& to, const SequenceDesc& s, int head,
              int begin, int rows, int chunks) {
  for (int row = begin; row < begin + rows; ++row) {
    std::memcpy(RowOf(to, s.batch, head, row), RowOf(from, s.batch, head, row), chunks * 16);
  }
}

void Forward(const ProblemDesc& p, const TileWork& tile) {
  const SequenceDesc& s = p.sequences[tile.batch];
  const int chunks = std::min(p.qk_chunks, p.v_chunks);
  CopyRows(p.q, p.o, s, tile.head, s.q_begin, s.q_len, chunks);
  float* lse = p.lse + s.batch * p.lse_batch + tile.head * p.lse_head + s.q_begin;
  for (int row = 0; row < s.q_len; ++row) lse[row] = static_cast<float>(row);
}

void Backward(const ProblemDesc& p, const TileWork& tile) {
  const SequenceDesc& s = p.sequences[tile.batch];
  CopyRows(p.k, p.d_k, s, tile.head, s.kv_begin, s.kv_len, p.qk_chunks);
  CopyRows(p.v, p.d_v, s, tile.head, s.kv_begin, s.kv_len, p.v_chunks);
  for (int head = tile.head * p.group; head < (tile.head + 1) * p.group; ++head) {
    CopyRows(p.q, p.d_q, s, head, s.q_begin, s.q_len, p.qk_chunks);
  }
}

}  // namespace

void RunKernel(const std::string& name, const LaunchParams& params) {
  // Entries bear the mangled names of kernels/sm70/entry.cuh's instantiations.
  const bool forward = name.find("ForwardKernel") != std::string::npos;
  const bool backward = name.find("BackwardKernel") != std::string::npos;
  if (!forward && !backward) return;
  for (int n = 0; n < params.tile_count; ++n) {
    const TileWork& tile = params.tiles[n];
    if (tile.tile != 0) continue;  // a head's first tile does all of it
    const ProblemDesc& problem = params.problems[tile.problem];
    forward ? Forward(problem, tile) : Backward(problem, tile);
  }
}

World::World() {
  for (int n = 0; n < kMaxDevices; ++n) devices[n].ordinal = n;
}

World& world() {
  static World& instance = *new World();
  return instance;
}

void World::Push(Stream& stream, Operation operation) {
  if (jitter > 0) operation.seconds *= 1 + jitter * std::uniform_real_distribution<>()(random);
  stream.operations.push_back(std::move(operation));
}

// The front operation begins if its engine is free, or passes at once if it is an event's.
bool World::BeginOrPass(Stream& stream) {
  if (stream.operations.empty()) return false;
  Operation& front = stream.operations.front();
  if (front.finish >= 0) return false;
  if (front.wait != nullptr && front.wait->passed < front.wait_for) return false;
  if (front.engine != EngineKind::kNone) {
    bool& busy = stream.device->busy[static_cast<int>(front.engine)];
    if (busy) return false;
    busy = true;
    front.finish = now + front.seconds;
    return true;
  }
  if (front.record != nullptr) {
    ++front.record->passed;
    front.record->time = now;
  }
  if (front.effect) front.effect();
  stream.operations.pop_front();
  return true;
}

bool World::Step(Device& device) {
  if (device.lost != CUDA_SUCCESS) return false;
  for (bool moved = true; moved;) {
    moved = false;
    for (Stream* stream : device.streams) moved = BeginOrPass(*stream) || moved;
  }
  Stream* next = nullptr;
  for (Stream* stream : device.streams) {
    if (stream->operations.empty() || stream->operations.front().finish < 0) continue;
    if (next == nullptr || stream->operations.front().finish < next->operations.front().finish) {
      next = stream;
    }
  }
  if (next == nullptr) return false;
  Operation done = std::move(next->operations.front());
  next->operations.pop_front();
  device.busy[static_cast<int>(done.engine)] = false;
  now = std::max(now, done.finish);
  if (done.traps) {
    device.lost = CUDA_ERROR_ILLEGAL_ADDRESS;
    return false;
  }
  if (done.effect) done.effect();
  for (bool moved = true; moved;) {
    moved = false;
    for (Stream* stream : device.streams) moved = BeginOrPass(*stream) || moved;
  }
  return true;
}

void World::Drain(Stream& stream) {
  while (!stream.operations.empty() && Step(*stream.device)) {
  }
}

}  // namespace attnd::fake
