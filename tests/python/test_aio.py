"""attnd.aio: calls beside each other, and coroutines that are cancelled."""
import asyncio
import threading

import numpy as np
import pytest

import attnd
import attnd.aio
import attnd.masks

Q = np.random.default_rng(1).standard_normal((2, 4, 16, 8), np.float32)


def test_dir_is_what_is_for_use():
    assert dir(attnd.aio) == attnd.aio.__all__


def test_asyncio_runs_calls_beside_each_other(daemon):
    async def main():
        async with await attnd.aio.connect(daemon.address, calls=4) as client:
            assert await client.serving()
            assert (await client.info()).devices
            assert (await client.compile_mask(attnd.masks.causal(), rows=9)).nnz == 45
            results = await asyncio.gather(*[client.forward(Q, Q, Q, request_id=f"call {n}") for n in range(12)])
            gradients = await client.backward(results[0].out, results[0])
            with pytest.raises(attnd.InvalidArgument, match="did you mean causal"):
                await client.forward(Q, Q, Q, causl=True)
            return results, gradients, client.client

    results, gradients, client = asyncio.run(main())
    with attnd.connect(daemon.address) as plain:
        expected = plain.forward(Q, Q, Q)
        np.testing.assert_array_equal(gradients.dk, plain.backward(expected.out, expected).dk)
    for result in results:
        np.testing.assert_array_equal(result.out, expected.out)
    with pytest.raises(attnd.InvalidArgument, match="client: expected an open client"):
        client.forward(Q, Q, Q)


def test_a_cancelled_coroutine_ends_its_call(daemon):
    long = np.ones((1, 16, 8192, 64), np.float32)
    begun = threading.Event()

    async def main():
        async with await attnd.aio.connect(daemon.address) as client:
            task = asyncio.create_task(client.forward(long, long, long, progress=lambda now: begun.set()))
            await asyncio.to_thread(begun.wait)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return (await client.forward(Q, Q, Q)).out.shape

    assert asyncio.run(main()) == Q.shape
    assert daemon.metric("attnd_cancelled_requests_total") >= 1
