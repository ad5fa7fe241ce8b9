// TuneForTransport: process-wide settings that bulk gRPC traffic wants, for programs of our own (a
// library leaves its host process alone). Call it early in main, before any other thread runs.
//
// gRPC's receive slices come from malloc: without it glibc gives their pages back and faults them
// in again for every message (23 to 65 % of throughput). Few arenas, because each keeps the most
// that its threads ever held at once: with eight a core, memory grew by up to 1.4 MiB a
// second under load; with four it levels off, at the same throughput. Debian's abseil is built
// with its deadlock detector, which runs on each lock (half of a small call's latency).
#pragma once

namespace attnd {

void TuneForTransport();

}  // namespace attnd
