"""attn_implementation="attnd" on small random models, against "eager" (what each model itself defines) and "sdpa"."""
import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import attnd.transformers  # noqa: E402

SMALL = dict(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=64)
GROUPED = dict(SMALL, num_key_value_heads=2, head_dim=8)


def model_of(name):
    """A causal language model with every kind of attention that its family has."""
    configs = {
        "gpt2": lambda: transformers.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64,
                                                attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
        "llama": lambda: transformers.LlamaConfig(**GROUPED),
        "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=6),
        "gemma2": lambda: transformers.Gemma2Config(**GROUPED, sliding_window=6, query_pre_attn_scalar=8,
                                                    attn_logit_softcapping=1.5),
        "gpt_oss": lambda: transformers.GptOssConfig(**GROUPED, sliding_window=6, num_local_experts=2,
                                                     num_experts_per_tok=1),
        "qwen3": lambda: transformers.Qwen3Config(**GROUPED),
    }
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(configs[name]())
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
        if any(part in parameter_name for part in ("q_proj.weight", "k_proj.weight", "c_attn.weight")):
            torch.nn.init.normal_(parameter, std=0.4)  # scores of a few units: attention that is far from uniform
    return model.eval()


@pytest.fixture(autouse=True)
def registered(client):
    attnd.transformers.register(client)


def both(model, **inputs):
    """Logits and the gradients of all parameters, by eager attention and by ours."""
    results = []
    keep = inputs["attention_mask"].bool() if "attention_mask" in inputs else ...
    for implementation in ("eager", "attnd"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        logits = model(**inputs).logits[keep]
        logits.float().log_softmax(-1)[..., 7].sum().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results.append((logits.detach(), gradients))
    return results


def compare(results):
    (expected, expected_gradients), (got, gradients) = results
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        scale = float(expected_gradients[name].abs().max().clamp(min=1e-3))
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-3, atol=1e-4 * max(scale, 1), msg=name)


MODELS = ["gpt2", "llama", "mistral", "gemma2", "gpt_oss", "qwen3"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_model_and_its_gradients_agree_with_eager(name, padding):
    model, tokens = model_of(name), torch.randint(0, 99, (3, 17))
    inputs = {"input_ids": tokens}
    if padding != "none":
        mask = torch.ones_like(tokens)
        mask[1, (slice(0, 4) if padding == "left" else slice(13, None))] = 0
        inputs["attention_mask"] = mask
    compare(both(model, **inputs))


@pytest.mark.parametrize("name, cache", [(name, "dynamic") for name in MODELS] + [("mistral", "static")])
def test_generation_with_a_cache_gives_eager_tokens(name, cache):
    model, tokens = model_of(name), torch.randint(0, 99, (2, 9))
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    texts = []
    for implementation in ("eager", "attnd"):
        model.set_attn_implementation(implementation)
        more = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
        texts.append(model.generate(tokens, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0,
                                    **more))
    assert torch.equal(*texts)


@pytest.fixture
def sent(client, monkeypatch):
    """Which of these options each call has that reaches the client."""
    calls, forward = [], type(client).forward

    def noted(self, q, k, v, **options):
        names = ("mask", "causal", "window", "kv_lengths", "cu_seqlens_q", "bias", "sink", "softcap")
        given = {name for name in names if options.get(name) is not None}
        calls.append(given if options.get("softcap") else given - {"softcap"})
        return forward(self, q, k, v, **options)

    monkeypatch.setattr(type(client), "forward", noted)
    return calls


@pytest.mark.parametrize("name, padding, expected", [
    ("llama", "right", [{"causal", "kv_lengths"}] * 2), ("llama", "left", [{"causal", "mask"}] * 2),
    ("mistral", "left", [{"causal", "window", "mask"}] * 2),
    ("gpt_oss", "left", [{"causal", "window", "mask", "sink"}, {"causal", "mask", "sink"}]),
    ("mistral", "none", [{"causal", "window"}] * 2), ("mistral", "right", [{"causal", "window", "kv_lengths"}] * 2),
    ("gemma2", "none", [{"causal", "window", "softcap"}, {"causal", "softcap"}]),
    ("gpt_oss", "right", [{"causal", "window", "kv_lengths", "sink"}, {"causal", "kv_lengths", "sink"}]),
])
def test_masks_that_are_options_travel_as_options(sent, name, padding, expected):
    model, tokens = model_of(name), torch.randint(0, 99, (3, 17))
    mask = torch.ones_like(tokens)
    if padding != "none":
        mask[1, (slice(0, 4) if padding == "left" else slice(13, None))] = 0
    with torch.no_grad():
        logits = []
        for implementation in ("eager", "attnd"):
            model.set_attn_implementation(implementation)
            logits.append(model(tokens, attention_mask=mask).logits[mask.bool()])
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert sent == expected


def test_bidirectional_model_with_padding(sent):
    torch.manual_seed(1)
    model = transformers.BertModel(transformers.BertConfig(**SMALL), add_pooling_layer=False).eval()
    tokens, mask = torch.randint(0, 99, (3, 17)), torch.ones(3, 17, dtype=torch.long)
    mask[1, 9:] = 0
    states = []
    for implementation in ("eager", "attnd"):
        model.set_attn_implementation(implementation)
        states.append(model(tokens, attention_mask=mask).last_hidden_state[mask.bool()])
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-4)
    assert sent == [{"kv_lengths"}] * 2


def test_packed_positions_are_eager_attention_and_travel_as_sequences(sent):
    model, tokens = model_of("mistral"), torch.randint(0, 99, (1, 17))
    given = {"position_ids": torch.cat([torch.arange(7), torch.arange(10)])[None], "use_cache": False}
    for name, expected in (("mistral", [{"causal", "window", "mask"}] * 2), ("llama", [{"causal", "mask"}] * 2)):
        del sent[:]
        model = model_of(name)
        compare(both(model, input_ids=tokens, **given))
        assert sent == expected


def test_packed_positions_keep_documents_apart():
    model = model_of("llama")
    first, second = torch.randint(0, 99, (1, 7)), torch.randint(0, 99, (1, 10))
    model.set_attn_implementation("attnd")
    with torch.no_grad():
        packed = model(torch.cat([first, second], 1), position_ids=torch.cat([torch.arange(7), torch.arange(10)])[None],
                       use_cache=False).logits
        apart = torch.cat([model(first).logits, model(second).logits], 1)
    torch.testing.assert_close(packed, apart, rtol=1e-4, atol=1e-4)


def test_t5_with_its_position_bias_and_cross_attention():
    torch.manual_seed(2)
    config = transformers.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
                                   dropout_rate=0.0, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, 6:] = 0
    inputs = {"input_ids": torch.randint(1, 99, (2, 11)), "attention_mask": mask,
              "labels": torch.randint(1, 99, (2, 5))}
    results = []
    for implementation in ("eager", "attnd"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        result = model(**inputs)
        result.loss.backward()
        results.append((result.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters()
                                                 if p.grad is not None}))
    compare(results)
    assert any("relative_attention_bias" in name for name in results[1][1])


def test_dropout_in_training_is_ours_and_repeats_with_the_seed():
    model, tokens = model_of("gpt2").train(), torch.randint(0, 99, (2, 9))
    for block in model.transformer.h:
        block.attn.attn_dropout.p = 0.5
    model.set_attn_implementation("attnd")
    runs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        runs.append(model(tokens).logits.detach())
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_bfloat16_model_agrees_with_sdpa():
    model, tokens = model_of("llama").to(torch.bfloat16), torch.randint(0, 99, (2, 17))
    logits = []
    for implementation in ("sdpa", "attnd"):
        model.set_attn_implementation(implementation)
        logits.append(model(tokens).logits.detach().float())
    torch.testing.assert_close(*logits, rtol=0.05, atol=0.05)


def test_models_of_two_names_use_their_own_daemons(daemon):
    attnd.transformers.register(daemon.address, name="attnd_second", timeout=30)
    model, tokens = model_of("llama"), torch.randint(0, 99, (1, 5))
    other = copy.deepcopy(model)
    model.set_attn_implementation("attnd")
    other.set_attn_implementation("attnd_second")
    torch.testing.assert_close(model(tokens).logits, other(tokens).logits)


# ---- Mask functions as descriptions.

LEFT = torch.tensor([0, 3])
IDS = torch.tensor([[-1] * 4 + [0] * 5 + [-1] * 6 + [1] * 8 + [-1] * 7, [0] * 6 + [-1] * 24])
POSITIONS = torch.stack([torch.cat([torch.arange(11), torch.arange(19)]), torch.cat([torch.arange(4), torch.arange(26)])])
PACKED = torch.stack([torch.arange(30) // 11 > 0, torch.arange(30) // 4 > 0]).long()
PREFIX = torch.tensor([4, 9])
FUNCTIONS = {
    "causal": lambda f: f.causal_mask_function,
    "bidirectional": lambda f: f.bidirectional_mask_function,
    "sliding": lambda f: f.sliding_window_causal_mask_function(6),
    "sliding both ways": lambda f: f.sliding_window_bidirectional_mask_function(5),
    "chunked": lambda f: f.chunked_causal_mask_function(8, torch.zeros(2, dtype=torch.long)),
    "chunked after padding": lambda f: f.chunked_causal_mask_function(8, LEFT),
    "images": lambda f: f.or_masks(f.causal_mask_function, f.blockwise_overlay(IDS)),
    "images in windows": lambda f: f.and_masks(f.sliding_window_overlay(9), f.or_masks(f.causal_mask_function,
                                                                                      f.blockwise_overlay(IDS))),
}


def packed(f, function, positions, ids):
    """As transformers combines them: by version in this order or the other."""
    return f.remap_positions_for_packed_sequence(function, positions), f.packed_sequence_mask_function(ids)


def packed_images(f, function, positions=POSITIONS):
    """Images of several packed sequences, which see all of themselves."""
    remapped, ids = packed(f, function, positions, PACKED)
    return f.and_masks(f.or_masks(remapped, f.blockwise_overlay(IDS)), ids)


AT_THE_START = {  # those that know no offset, and a model's own
    "packed": lambda f: f.and_masks(*packed(f, f.causal_mask_function, POSITIONS, PACKED)),
    "packed, ids first": lambda f: f.and_masks(*packed(f, f.causal_mask_function, POSITIONS, PACKED)[::-1]),
    "packed windows": lambda f: f.and_masks(*packed(f, f.sliding_window_causal_mask_function(5),
                                                    POSITIONS[:1].expand(2, -1), PACKED[:1].expand(2, -1))),
    "packed images": lambda f: packed_images(f, f.causal_mask_function),
    "packed images in windows": lambda f: packed_images(f, f.sliding_window_causal_mask_function(5)),
    "packed images, nothing remapped": lambda f: f.and_masks(f.packed_sequence_mask_function(PACKED),
                                                             f.blockwise_overlay(IDS)),
    "prefix": lambda f: f.or_masks(f.causal_mask_function, lambda b, h, q, k: k < 7),
    "prefix of each entry": lambda f: f.or_masks(f.causal_mask_function, lambda b, h, q, k: k < PREFIX[b]),
    "own documents": lambda f: f.and_masks(f.causal_mask_function, lambda b, h, q, k: IDS[b, q] == IDS[b, k]),
}


def padding_of(kind):
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[1, {"left": slice(0, 3), "right": slice(22, None), "holes": slice(5, 9)}[kind]] = False
    return mask


@pytest.mark.parametrize("kind", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("name", [*FUNCTIONS, *AT_THE_START])
def test_mask_functions_are_described_as_they_are(name, kind):
    import attnd.masks as m
    from attnd.masks.models import LazyMask, model_mask
    from transformers import masking_utils
    function = {**FUNCTIONS, **AT_THE_START}[name](masking_utils)
    padding = None if kind == "none" else padding_of(kind)
    for q_length, kv_length, q_offset, kv_offset in ((30, 30, 0, 0), (4, 30, 26, 0), (1, 30, 29, 0), (5, 12, 25, 18)):
        if name in AT_THE_START and q_offset:
            continue
        given = dict(batch_size=2, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
                     mask_function=function, attention_mask=padding, allow_is_causal_skip=False)
        expected, found = masking_utils.sdpa_mask(**given), model_mask(**given)
        assert isinstance(found, LazyMask) and found.shape == (2, 1, q_length, kv_length), name
        options = dict(found.options)
        left, right = options.pop("window", (-1, -1))
        shown = m.window(left, 0 if options.pop("causal", False) else right)
        mask, align = options.pop("mask", None), options.pop("align", 0)
        if isinstance(mask, m.Mask):
            shown = shown & mask
        dense = torch.from_numpy(shown.to_dense(2, 1, q_length, kv_length, align=align))
        if isinstance(mask, torch.Tensor):
            dense = dense & mask
        if "kv_lengths" in options:
            dense = dense & (torch.arange(kv_length) < options.pop("kv_lengths")[:, None, None, None])
        assert not options and torch.equal(dense, expected), (name, q_offset)
        assert torch.equal(found & True, expected) and torch.equal(found[1:, :, :2].clone(), expected[1:, :, :2])


def test_functions_that_no_description_says_are_dense_masks():
    from attnd.masks.models import LazyMask, model_mask
    from transformers import masking_utils as f
    skipping = POSITIONS + (torch.arange(30) > 20)  # positions that leave one out amid a sequence
    for function in (lambda b, h, q, k: (q * k) % 3 == 0, lambda b, h, q, k: torch.where(q > 3, k > 3, k < 3),
                     packed_images(f, f.sliding_window_causal_mask_function(5), skipping),
                     f.remap_positions_for_packed_sequence(f.causal_mask_function, POSITIONS),
                     packed_images(f, f.chunked_causal_mask_function(8, torch.zeros(2, dtype=torch.long)))):
        given = dict(batch_size=2, q_length=30, kv_length=30, mask_function=function, allow_is_causal_skip=False)
        found = model_mask(**given)
        assert not isinstance(found, LazyMask) and torch.equal(found, f.sdpa_mask(**given))


def test_a_function_that_is_not_what_its_name_says_is_a_dense_mask(monkeypatch):
    """As another version of transformers may have it."""
    from attnd.masks import models
    from transformers import masking_utils

    def sliding_window_overlay(sliding_window):
        def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
            return kv_idx >= q_idx - sliding_window
        inner_mask.__module__ = "transformers.masking_utils"
        inner_mask.__qualname__ = "sliding_window_overlay.<locals>.inner_mask"
        return inner_mask
    monkeypatch.setattr(models, "_checked", set())
    monkeypatch.setattr(models, "_refused", set())
    given = dict(batch_size=2, q_length=30, kv_length=30, mask_function=sliding_window_overlay(4),
                 allow_is_causal_skip=False)
    with pytest.warns(RuntimeWarning, match="are not those known here"):
        found = models.model_mask(**given)
    assert torch.equal(found, masking_utils.sdpa_mask(**given))


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The most elements of any tensor that an operator makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        made = function(*arguments, **(keywords or {}))
        for tensor in torch.utils._pytree.tree_leaves(made):
            if type(tensor) is torch.Tensor and tensor.untyped_storage().nbytes() > 0:
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return made


def test_8192_tokens_of_packed_images_without_an_array_of_all_scores():
    """Does what a model of images and text does with packed sequences: its mask, and its attention under it."""
    from attnd.masks.models import LazyMask
    from transformers.masking_utils import create_causal_mask
    n, heads = 8192, 2
    config = transformers.LlamaConfig(vocab_size=9, hidden_size=32, intermediate_size=16, num_attention_heads=heads)
    config._attn_implementation = "attnd"
    positions = torch.cat([torch.arange(5000), torch.arange(n - 5000)])[None]
    ids = torch.full((1, n), -1)
    ids[0, 1000:1300], ids[0, 4900:5100], ids[0, 7000:7040] = 0, 1, 2  # the second one reaches over the border
    torch.manual_seed(1)
    q, k, v = [torch.randn(1, heads, n, 16, requires_grad=True) for _ in range(3)]
    attend = transformers.AttentionInterface()["attnd"]
    with Largest() as largest:
        mask = create_causal_mask(config, torch.zeros(1, n, 32), None, None, position_ids=positions, block_sequence_ids=ids)
        out, _ = attend(torch.nn.Module(), q, k, v, mask)
        out.square().sum().backward()
    assert isinstance(mask, LazyMask) and largest.elements < n * n // 16, largest.elements
    rows = torch.tensor([0, 1100, 4999, 5000, 5050, 7010, n - 1])
    config._attn_implementation = "sdpa"  # transformers' own array
    seen = create_causal_mask(config, torch.zeros(1, n, 32), None, None, position_ids=positions, block_sequence_ids=ids)
    assert seen[0, 0, 1100, 1299] and not seen[0, 0, 7010, 4000] and not seen[0, 0, 5050, 4000]
    seen = seen[0, 0, rows]
    expected = torch.nn.functional.scaled_dot_product_attention(q[:, :, rows], k, v, attn_mask=seen)
    torch.testing.assert_close(out[:, rows].transpose(1, 2), expected, rtol=1e-4, atol=1e-5)
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("name, padding", [("mistral", "left"), ("llama", "packed")])
def test_8192_tokens_without_an_array_of_all_scores(name, padding):
    n = 8192
    config = dict(vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                  num_key_value_heads=1, max_position_embeddings=n)
    kind = {"mistral": lambda: transformers.MistralConfig(**config, sliding_window=512),
            "llama": lambda: transformers.LlamaConfig(**config)}[name]
    torch.manual_seed(1)
    model = transformers.AutoModel.from_config(kind()).eval()
    model.set_attn_implementation("attnd")
    tokens = torch.randint(0, 9, (1, n))
    if padding == "left":
        mask = torch.ones(1, n, dtype=torch.long)
        mask[:, :100] = 0
        given = {"attention_mask": mask}
    else:
        given = {"position_ids": torch.cat([torch.arange(5000), torch.arange(n - 5000)])[None], "use_cache": False}
    with Largest() as largest:
        states = model(tokens, **given).last_hidden_state
        states.square().sum().backward()
    assert largest.elements < n * n // 16, largest.elements
    assert all(p.grad.isfinite().all() for p in model.parameters()) and states.isfinite().all()
    with Largest() as dense:
        torch.ones(n, n, dtype=torch.bool)
    assert dense.elements == n * n
