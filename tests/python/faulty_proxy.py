"""A proxy of gRPC calls that loses replies, sends requests twice, delays replies and lets calls overtake one another: each
with a chance of 20 %, one at most for a call."""
import collections
import random
import threading
import time
from concurrent import futures

import grpc

FAULTS = ("drop", "double", "delay", "reorder")
MOST_DELAY = 0.03


class FaultyProxy(grpc.GenericRpcHandler):
    def __init__(self, address, seed):
        self._chance, self._arrived, self._count = random.Random(seed), threading.Condition(), 0
        self.faults = collections.Counter()
        self._channel = grpc.insecure_channel(address)
        self._server = grpc.server(futures.ThreadPoolExecutor(32))
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self):
        self._server.stop(None).wait()
        self._channel.close()

    def service(self, details):
        return grpc.stream_stream_rpc_method_handler(
            lambda requests, context: self._forward(details.method, list(requests), context))

    def _forward(self, method, requests, context):
        with self._arrived:
            self._count += 1
            mine, fault = self._count, self._chance.choice([*FAULTS, None])
            delay = self._chance.uniform(0, MOST_DELAY)
            self.faults[fault] += 1
            self._arrived.notify_all()
            if fault == "reorder":  # behind the next call
                self._arrived.wait_for(lambda: self._count > mine, MOST_DELAY)
        try:
            for _ in range(2 if fault == "double" else 1):
                call = self._channel.stream_stream(method)(iter(requests), timeout=20)
                replies = list(call)
        except grpc.RpcError as error:
            context.set_trailing_metadata(tuple(error.trailing_metadata() or ()))
            context.abort(error.code(), error.details())
        if fault == "drop":
            context.abort(grpc.StatusCode.UNAVAILABLE, "the reply is lost")
        if fault == "delay":
            time.sleep(delay)
        yield from replies
