// A stand-in for libnccl.so.2 for tests without a GPU: communicators between processes of one host,
// on host memory, non-blocking alone. A hub in the process that made the id passes frames on:
//
//   rank → hub: its number, then frames {to, bytes} and their bytes → rank `to`: {from, bytes}, ...
//
// It refuses mistakes of a process: an id that is joined twice by one rank, a call while another
// is under way, sizes that differ between sender and receiver. FAKE_NCCL_STALL names a
// file: the second operation of the process writes it and never ends, unless the file is there.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

// Values of nccl.h.
enum Result { kSuccess = 0, kInvalidArgument = 4, kInvalidUsage = 5, kRemoteError = 6 };
constexpr int kInProgress = 7;
constexpr int kFloat32 = 7;
constexpr int64_t kNumberBytes = 4;

struct Id {
  char name[128];  // of the hub's socket, in the abstract namespace
};
struct Config {
  size_t size;
  unsigned magic, version;
  int blocking;
};
struct Frame {
  int32_t rank;  // to, or from
  int64_t bytes;
};

sockaddr_un AddressOf(const char* name, socklen_t& length) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const size_t bytes = strnlen(name, sizeof(address.sun_path) - 1);
  std::memcpy(address.sun_path + 1, name, bytes);
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + bytes);
  return address;
}

bool WriteAll(int socket, const void* data, int64_t bytes) {
  const auto* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t done = send(socket, next, static_cast<size_t>(bytes), MSG_NOSIGNAL);
    if (done <= 0) return false;
    next += done;
    bytes -= done;
  }
  return true;
}

bool ReadAll(int socket, void* data, int64_t bytes) {
  return bytes == 0 ||
         recv(socket, data, static_cast<size_t>(bytes), MSG_WAITALL) == static_cast<ssize_t>(bytes);
}

// ---- The hub: one for each id, until a rank leaves.

struct Hub {
  std::map<int, int> sockets;  // by rank, complete before frames pass
  std::map<int, std::mutex> writing;
  ~Hub() {
    for (const auto& [rank, socket] : sockets) close(socket);
  }
  void Close() {
    for (const auto& [rank, socket] : sockets) shutdown(socket, SHUT_RDWR);
  }
  void PassOn(int from) {
    std::vector<char> bytes;
    for (Frame frame; ReadAll(sockets[from], &frame, sizeof(frame));) {
      bytes.resize(static_cast<size_t>(frame.bytes));
      if (!ReadAll(sockets[from], bytes.data(), frame.bytes)) break;
      const int to = frame.rank;
      frame.rank = from;
      std::lock_guard<std::mutex> lock(writing[to]);
      if (!WriteAll(sockets[to], &frame, sizeof(frame)) ||
          !WriteAll(sockets[to], bytes.data(), frame.bytes)) {
        break;
      }
    }
    Close();
  }
};

void RunHub(int listener) {
  const auto hub = std::make_shared<Hub>();
  for (int ranks = 1; static_cast<int>(hub->sockets.size()) < ranks;) {
    const int socket = accept(listener, nullptr, nullptr);
    int32_t hello[2];  // rank, ranks
    if (socket < 0 || !ReadAll(socket, hello, sizeof(hello)) || hub->sockets.count(hello[0]) > 0) {
      close(socket);
      continue;
    }
    hub->sockets[hello[0]] = socket;
    ranks = hello[1];
  }
  close(listener);
  for (const auto& [rank, socket] : hub->sockets) {
    hub->writing[rank];
    WriteAll(socket, "", 1);  // all are there
  }
  for (const auto& [rank, socket] : hub->sockets) {
    std::thread([hub, from = rank] { hub->PassOn(from); }).detach();
  }
}

// ---- Communicators.

struct Operation {
  bool is_send = false;
  int peer = 0;
  void* data = nullptr;
  int64_t bytes = 0;
};

struct Communicator {
  int socket = -1, rank = 0, ranks = 0;
  std::atomic<int> state{kSuccess};
  std::thread work;
  std::map<int, std::deque<std::vector<char>>> inbox;  // by sender

  // Runs it on a thread of its own.
  int Begin(std::function<bool()> run) {
    if (state != kSuccess) return kInvalidUsage;
    if (work.joinable()) work.join();
    state = kInProgress;
    work = std::thread([this, run = std::move(run)] {
      int expected = kInProgress;
      state.compare_exchange_strong(expected, run() ? kSuccess : kRemoteError);
    });
    return kInProgress;
  }

  bool SendAll(const std::vector<Operation>& operations) const {
    for (const Operation& operation : operations) {
      const Frame frame = {operation.peer, operation.bytes};
      if (operation.is_send && (!WriteAll(socket, &frame, sizeof(frame)) ||
                                !WriteAll(socket, operation.data, operation.bytes))) {
        return false;
      }
    }
    return true;
  }

  bool ReceiveAll(const std::vector<Operation>& operations) {
    for (const Operation& operation : operations) {
      if (operation.is_send) continue;
      std::deque<std::vector<char>>& from = inbox[operation.peer];
      while (from.empty()) {
        Frame frame;
        if (!ReadAll(socket, &frame, sizeof(frame))) return false;
        std::vector<char> bytes(static_cast<size_t>(frame.bytes));
        if (!ReadAll(socket, bytes.data(), frame.bytes)) return false;
        inbox[frame.rank].push_back(std::move(bytes));
      }
      if (static_cast<int64_t>(from.front().size()) != operation.bytes) return false;
      std::memcpy(operation.data, from.front().data(), from.front().size());
      from.pop_front();
    }
    return true;
  }

  bool Run(const std::vector<Operation>& operations) {
    bool sent = false;
    std::thread sender([&] { sent = SendAll(operations); });
    const bool received = ReceiveAll(operations);
    sender.join();
    return sent && received;
  }
};

std::atomic<int> operations_begun{0};

// Whether the operation that begins now is to stall.
bool Stalls() {
  const char* path = std::getenv("FAKE_NCCL_STALL");
  if (path == nullptr || ++operations_begun < 2 || std::ifstream(path).good()) return false;
  std::ofstream(path) << "stalled\n";
  return true;
}

int Launch(Communicator& communicator, std::vector<Operation> operations) {
  return communicator.Begin([&communicator, operations = std::move(operations)] {
    if (!Stalls()) return communicator.Run(operations);
    for (char byte; recv(communicator.socket, &byte, 1, 0) > 0;) {
    }
    return false;  // aborted
  });
}

thread_local int group_depth = 0;
thread_local std::map<Communicator*, std::vector<Operation>> grouped;

int Add(Communicator* communicator, int type, const Operation& operation) {
  if (type != kFloat32 || operation.bytes <= 0 || operation.peer < 0 ||
      operation.peer >= communicator->ranks || operation.peer == communicator->rank) {
    return kInvalidArgument;
  }
  if (group_depth == 0 || communicator->state != kSuccess) return kInvalidUsage;
  grouped[communicator].push_back(operation);
  return kSuccess;
}

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
  *version = 22304;
  return kSuccess;
}
const char* ncclGetErrorString(int result) {
  switch (result) {
    case kInvalidArgument:
      return "invalid argument";
    case kInvalidUsage:
      return "invalid usage";
    case kRemoteError:
      return "remote process exited or there was a network error";
    default:
      return "no error";
  }
}

int ncclGetUniqueId(Id* id) {
  std::random_device random;  // processes of sandboxes may have equal numbers
  const std::string name =
      "attnd_fake_nccl_" + std::to_string(random()) + "_" + std::to_string(random());
  *id = {};
  name.copy(id->name, sizeof(id->name) - 1);
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  socklen_t length = 0;
  const sockaddr_un address = AddressOf(id->name, length);
  if (bind(listener, reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      listen(listener, 64) != 0) {
    return kInvalidUsage;
  }
  std::thread(RunHub, listener).detach();
  return kSuccess;
}

int ncclCommInitRankConfig(Communicator** out, int ranks, Id id, int rank, Config* config) {
  if (config == nullptr || config->magic != 0xcafebeef || config->blocking != 0 ||
      config->version < 21400 || config->size < sizeof(Config)) {
    return kInvalidArgument;
  }
  static std::mutex mutex;
  static std::set<std::pair<std::string, int>>& joined = *new std::set<std::pair<std::string, int>>;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (!joined.emplace(id.name, rank).second) return kInvalidUsage;
  }
  auto* made = new Communicator();
  made->rank = rank;
  made->ranks = ranks;
  made->socket = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  *out = made;
  return made->Begin([made, id] {
    socklen_t length = 0;
    const sockaddr_un address = AddressOf(id.name, length);
    const int32_t hello[2] = {made->rank, made->ranks};
    char all_there;
    return connect(made->socket, reinterpret_cast<const sockaddr*>(&address), length) == 0 &&
           WriteAll(made->socket, hello, sizeof(hello)) && ReadAll(made->socket, &all_there, 1);
  });
}

int ncclCommGetAsyncError(Communicator* communicator, int* result) {
  *result = communicator->state;
  return kSuccess;
}

int ncclCommAbort(Communicator* communicator) {
  shutdown(communicator->socket, SHUT_RDWR);
  if (communicator->work.joinable()) communicator->work.join();
  close(communicator->socket);
  delete communicator;
  return kSuccess;
}

int ncclGroupStart() {
  ++group_depth;
  return kSuccess;
}

int ncclGroupEnd() {
  if (--group_depth > 0) return kSuccess;
  int result = kSuccess;
  for (auto& [communicator, operations] : std::exchange(grouped, {})) {
    result = Launch(*communicator, std::move(operations));
  }
  return result;
}

int ncclSend(const void* from, size_t count, int type, int peer, Communicator* communicator,
             void*) {
  return Add(communicator, type,
             {.is_send = true,
              .peer = peer,
              .data = const_cast<void*>(from),
              .bytes = static_cast<int64_t>(count) * kNumberBytes});
}

int ncclRecv(void* to, size_t count, int type, int peer, Communicator* communicator, void*) {
  return Add(communicator, type,
             {.peer = peer, .data = to, .bytes = static_cast<int64_t>(count) * kNumberBytes});
}

int ncclAllGather(const void* share, void* all, size_t count, int type, Communicator* communicator,
                  void*) {
  if (type != kFloat32 || count == 0 || group_depth > 0) return kInvalidArgument;
  const int64_t bytes = static_cast<int64_t>(count) * kNumberBytes;
  std::vector<Operation> operations;
  for (int rank = 0; rank < communicator->ranks; ++rank) {
    char* place = static_cast<char*>(all) + rank * bytes;
    if (rank == communicator->rank) {
      std::memmove(place, share, static_cast<size_t>(bytes));
      continue;
    }
    operations.push_back(
        {.is_send = true, .peer = rank, .data = const_cast<void*>(share), .bytes = bytes});
    operations.push_back({.peer = rank, .data = place, .bytes = bytes});
  }
  return Launch(*communicator, std::move(operations));
}

}  // extern "C"
