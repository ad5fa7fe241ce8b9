// ReportedLoad: the load by modules that a server tells of in trailers of their calls:
// attnd-module-queue-seconds, the work of those under way; attnd-module-memory, the part that is
// used of what this caller's may take.
#pragma once

namespace attnd {

struct ReportedLoad {
  double queue_seconds = 0;
  double memory = 0;  // 0..1
};

}  // namespace attnd
