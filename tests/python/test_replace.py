"""attnd.torch.replace(): what reaches the daemon, counted there, what warns that it does not, and that all is put back."""
import functools
import types
import warnings

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

import attnd.torch as remote  # noqa: E402
from attnd import _replacement  # noqa: E402


@pytest.fixture(autouse=True)
def connected(client, monkeypatch):
    remote.connect(client)
    monkeypatch.setattr(_replacement, "_warned", set())
    original, attend = F.scaled_dot_product_attention, F.multi_head_attention_forward
    yield
    assert F.scaled_dot_product_attention is original and F.multi_head_attention_forward is attend
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.fixture
def calls(monkeypatch):
    """Counts the calls that go to the daemon."""
    counted, forward = [], attnd_client().forward
    monkeypatch.setattr(type(attnd_client()), "forward", lambda self, *a, **o: (counted.append(1), forward(*a, **o))[1])
    return counted


def attnd_client():
    return remote.client()


def multi_head(x, **options):
    return torch.nn.MultiheadAttention(32, 4, batch_first=True), lambda module: module(x, x, x, **options)


def encoder_layer(x):
    return torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), lambda module: module(x)


def encoder(x):
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    hidden = torch.arange(x.shape[1]) >= torch.tensor([[7], [x.shape[1]]])
    return torch.nn.TransformerEncoder(layer, 2), lambda module: module(x, src_key_padding_mask=hidden)


def decoder_layer(x):
    return torch.nn.TransformerDecoderLayer(32, 4, 64, batch_first=True), lambda module: module(x, x)


MODULES = {"attention": functools.partial(multi_head, need_weights=False), "encoder layer": encoder_layer,
           "encoder": encoder, "decoder layer": decoder_layer}
LEAST = {"attention": 1, "encoder layer": 1, "encoder": 2, "decoder layer": 2}


@pytest.mark.parametrize("mode", ["train", "eval", "no_grad", "inference"])
@pytest.mark.parametrize("name", MODULES)
def test_pytorchs_own_modules_reach_the_daemon_in_every_mode(calls, name, mode):
    module, run = MODULES[name](torch.randn(2, 11, 32))
    module.train(mode == "train")
    for part in module.modules():
        if hasattr(part, "dropout") and isinstance(part.dropout, float) or isinstance(part, torch.nn.Dropout):
            part.dropout = part.p = 0.0
    grad = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(mode, torch.enable_grad)
    with grad():
        expected = run(module)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*need_weights")
            with remote.replace() as held:
                got = run(module)
    assert len(calls) == LEAST[name]
    for mine, theirs in zip(*[x if isinstance(x, tuple) else (x,) for x in (got, expected)]):
        if theirs is not None:  # the rows of padding are 0 by PyTorch's fast path alone
            seen = theirs != 0
            torch.testing.assert_close(mine[seen], theirs[seen], rtol=1e-3, atol=1e-4)
    assert "torch.nn.functional.scaled_dot_product_attention" in held.covers


def test_what_returns_its_weights_warns_once_naming_who_calls(calls):
    module, run = multi_head(torch.randn(2, 5, 32))
    with remote.replace():
        with pytest.warns(UserWarning, match=rf"{__name__} runs torch.nn.MultiheadAttention with need_weights=True"):
            run(module)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*need_weights")
            run(module)
    assert not calls


def test_what_returns_its_weights_warns_when_compiled():
    module, run = multi_head(torch.randn(2, 5, 32))
    with remote.replace(), pytest.warns(UserWarning, match="with need_weights=True"):
        torch.compile(run, backend="eager", fullgraph=True)(module)
    torch._dynamo.reset()


@pytest.fixture
def model():
    """A module as a user's file is, that imported the function before."""
    import sys
    made = types.ModuleType("users_model")
    exec("from torch.nn.functional import scaled_dot_product_attention\n"
         "def attend(q):\n    return scaled_dot_product_attention(q, q, q)\n", vars(made))
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


def test_a_name_that_was_imported_before_is_the_daemons_and_put_back(model, calls):
    q, original = torch.randn(1, 2, 5, 8), F.scaled_dot_product_attention
    with remote.replace() as held:
        model.attend(q)
        assert len(calls) == 1 and "users_model.scaled_dot_product_attention" in held.covers
        assert "users_model.scaled_dot_product_attention" in repr(held)
        exec("from torch.nn.functional import scaled_dot_product_attention", vars(model))
    assert model.scaled_dot_product_attention is original
    model.attend(q)
    assert len(calls) == 1


HOLDERS = {
    "users_model.sdpa": "from torch.nn.functional import scaled_dot_product_attention as sdpa",
    "users_model.Attention": "import torch\nclass Attention:\n    attend = torch.nn.functional.scaled_dot_product_attention",
    "users_model.Layer": "import torch\nclass Layer:\n    def __init__(self):\n"
                         "        self.attend = torch.nn.functional.scaled_dot_product_attention\nlayer = Layer()",
    "users_model.run": "import torch\ndef run(q, attend=torch.nn.functional.scaled_dot_product_attention): pass",
    "users_model.make.<locals>.run": "import torch\ndef make(attend):\n    def run(q): return attend(q)\n    return run\n"
                                     "run = make(torch.nn.functional.scaled_dot_product_attention)",
}


@pytest.mark.parametrize("name", HOLDERS)
def test_other_holders_of_the_function_are_named_once(model, name):
    exec(HOLDERS[name], vars(model))
    with pytest.warns(UserWarning) as caught:
        with remote.replace():
            pass
        with remote.replace():
            pass
    mine = [str(w.message) for w in caught if "users_model" in str(w.message)]
    assert len(mine) == 1 and mine[0].startswith(f"attnd.torch.replace: {name} holds PyTorch's"), mine


def test_warnings_that_are_errors_leave_all_as_it_was(model):
    exec(HOLDERS["users_model.sdpa"], vars(model))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*users_model")
        with pytest.raises(UserWarning, match="users_model.sdpa"):
            remote.replace()  # the fixture looks at what is left


def test_one_within_another_goes_back_to_it(model, calls):
    with remote.replace():
        outer = F.scaled_dot_product_attention
        with remote.replace():
            assert F.scaled_dot_product_attention is not outer and not torch.backends.mha.get_fastpath_enabled()
        assert F.scaled_dot_product_attention is model.scaled_dot_product_attention is outer
        assert not torch.backends.mha.get_fastpath_enabled()
