"""The CUDA path of the engine: every kernel against plain torch, whole runs against the plain forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"


@dataclass
class Counted:
    """Stands where a graph stood and notes its replays."""

    size: int
    graph: torch.cuda.CUDAGraph
    replays: list[int]

    def replay(self) -> None:
        self.replays.append(self.size)
        self.graph.replay()


def paged_case(heads: int, kv_heads: int, dim: int, lengths: list[int], dtype: torch.dtype) -> dict[str, Any]:
    block, width = 16, 8
    batch = len(lengths)
    keys = torch.randn(batch * width, block, kv_heads, dim, device=DEVICE, dtype=dtype)
    tables = torch.randperm(batch * width, device=DEVICE).view(batch, width).int()
    return {
        "query": torch.randn(batch, heads, dim, device=DEVICE, dtype=dtype).transpose(0, 1),
        "keys": keys,
        "values": torch.randn_like(keys),
        "tables": tables,
        "slots": torch.arange(batch, device=DEVICE),
        "lengths": torch.tensor(lengths, device=DEVICE),
    }


def naive_decode(case: dict[str, Any], scale: float, window: int | None, softcap: float | None) -> torch.Tensor:
    rows = []
    group = case["query"].shape[0] // case["keys"].shape[2]
    for row, length in enumerate(case["lengths"].tolist()):
        blocks = case["tables"][row].long()
        keys, values = (
            case[name][blocks].flatten(0, 1)[:length].double().repeat_interleave(group, 1)
            for name in ("keys", "values")
        )
        scores = torch.einsum("hd,nhd->hn", case["query"][:, row].double(), keys) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        if window:
            scores[:, : max(0, length - window)] = -torch.inf
        rows.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), values))
    return torch.stack(rows)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 32), (14, 2, 64), (28, 4, 128), (3, 1, 48), (4, 2, 256)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, None), (None, 5.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paged_decode(
    heads: int, kv_heads: int, dim: int, window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    from atlaslib.engine.cuda import paged_attention

    case = paged_case(heads, kv_heads, dim, [1, 16, 17, 100, 128, 63], dtype)
    ours = paged_attention.paged_decode(**case, scale=dim**-0.5, window=window, softcap=softcap).double()
    expected = naive_decode(case, dim**-0.5, window, softcap)
    error = float((ours - expected).norm() / expected.norm())
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 32), (14, 2, 64), (28, 4, 128), (3, 1, 48), (4, 2, 256)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, None), (None, 5.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paged_prefill(
    heads: int, kv_heads: int, dim: int, window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    """Whole prompts and later chunks of them, each of their rows against the decode reference at its own length."""
    from atlaslib.engine.attention import Span
    from atlaslib.engine.cuda import paged_attention
    from atlaslib.engine.cuda.layout import tiles_of

    chunks = [(0, 1), (0, 40), (16, 111), (33, 20), (0, 128)]  # first position, tokens
    case = paged_case(heads, kv_heads, dim, [start + count for start, count in chunks], dtype)
    rows = sum(count for _, count in chunks)
    query = torch.randn(rows, heads, dim, device=DEVICE, dtype=dtype).transpose(0, 1)
    spans, row = [], 0
    for slot, (start, count) in enumerate(chunks):
        spans.append(Span(row, count, start, slot, None))  # type: ignore[arg-type]
        row += count
    tiling = paged_attention.prefill_tiling(dim, dtype)
    tiles = torch.from_numpy(tiles_of(spans, tiling[0])).to(DEVICE)
    tiles = torch.cat([tiles, torch.zeros(3, 4, dtype=torch.int64, device=DEVICE)])  # empty ones do nothing
    scale = dim**-0.5
    ours = paged_attention.paged_prefill(
        query, case["keys"], case["values"], case["tables"], tiles, scale, window, softcap, tiling
    ).double()
    owners = torch.cat([torch.full((span.count,), span.slot, device=DEVICE) for span in spans])
    lengths = torch.cat([torch.arange(span.start, span.start + span.count, device=DEVICE) + 1 for span in spans])
    expected = naive_decode(
        case | {"query": query, "tables": case["tables"][owners], "lengths": lengths}, scale, window, softcap
    )
    error = float((ours - expected).norm() / expected.norm())
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)


def test_write_kv_puts_rows_where_the_slots_say_and_skips_negative_ones() -> None:
    from atlaslib.engine.cuda import kernels

    keys = torch.zeros(4, 16, 3, 20, device=DEVICE)
    values = torch.zeros(4, 16, 3, 24, device=DEVICE)
    key, value = (
        torch.randn(5, 3, 20, device=DEVICE).transpose(0, 1),
        torch.randn(5, 3, 24, device=DEVICE).transpose(0, 1),
    )
    slots = torch.tensor([3, -1, 63, 17, 0], device=DEVICE)
    kernels.write_kv(keys, values, slots, key, value)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(keys.view(64, 3, 20)[slot], key[:, row])
            assert torch.equal(values.view(64, 3, 24)[slot], value[:, row])
    assert int((keys.view(64, -1).abs().sum(1) > 0).sum()) == 4


@pytest.mark.parametrize("rows", [1, 5, 130])
def test_unpack_info_gathers_last_tokens_and_notes_each_position_s_block(rows: int) -> None:
    from atlaslib.engine.cuda import kernels

    block, width, slots = 16, 6, 200
    owners = torch.randperm(slots, device=DEVICE)[:rows]
    positions = torch.randint(0, block * width, (rows,), device=DEVICE)
    blocks = torch.randint(0, 1000, (rows,), device=DEVICE)
    info = torch.zeros(rows, 8, dtype=torch.int64, device=DEVICE)
    info[:, 0], info[:, 1], info[:, 2] = owners, positions, blocks * block + positions % block
    info[rows - 1 :, 2] = -1  # a row of padding leaves the tables alone
    last = torch.arange(slots, device=DEVICE) * 7
    tables = torch.full((slots, width), -5, dtype=torch.int32, device=DEVICE)
    expected = tables.clone()
    expected[owners[: rows - 1], positions[: rows - 1] // block] = blocks[: rows - 1].int()
    ids, at, where = kernels.unpack_info(info, last, tables, block)
    assert torch.equal(ids, last[owners])
    assert torch.equal(at, positions)
    assert torch.equal(where, info[:, 2])
    assert torch.equal(tables, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_norm_is_the_addition_and_the_norm_module(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    from atlaslib.engine.cuda import kernels

    norm = LlamaRMSNorm(896, eps=1e-5).to(DEVICE, dtype)
    norm.weight.data.normal_(1.0, 0.3)
    x, y = (torch.randn(37, 896, device=DEVICE, dtype=dtype) for _ in range(2))
    total, normed = kernels.add_norm(x, y, norm)
    assert torch.equal(total, x + y)
    torch.testing.assert_close(normed, norm(x + y), atol=1e-5 if dtype == torch.float32 else 1e-2, rtol=8e-3)
    torch.testing.assert_close(
        kernels.rms_norm(x, norm), norm(x), atol=1e-5 if dtype == torch.float32 else 1e-2, rtol=8e-3
    )


@pytest.mark.parametrize("rows", [1, 37, 256])
def test_a_down_projection_in_parts_is_the_layer_s(rows: int) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    from atlaslib.engine.cuda import fused, kernels

    linear = torch.nn.Linear(9472, 3584, bias=False, device=DEVICE, dtype=torch.bfloat16)
    norm = LlamaRMSNorm(3584, eps=1e-5).to(DEVICE, torch.bfloat16)
    h = torch.randn(rows, 9472, device=DEVICE, dtype=torch.bfloat16)
    x = torch.randn(rows, 3584, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        parts = fused.down_projection(linear, h)
        assert parts.shape == (2, rows, 3584)
        exact = h.double() @ linear.weight.double().T
        torch.testing.assert_close(parts.double().sum(0), exact, atol=1e-4, rtol=1e-4)
        total, normed = kernels.add_norm(x, parts, norm)
        expected = x + parts.sum(0).bfloat16()
        assert torch.equal(total, expected)
        torch.testing.assert_close(normed, norm(expected), atol=1e-2, rtol=8e-3)
        for other in (torch.nn.Linear(9472, 3584), torch.nn.Linear(9472, 64, bias=False)):  # a bias, a small weight
            assert fused.down_projection(other.to(DEVICE, torch.bfloat16), h).shape == (rows, other.out_features)


@pytest.mark.parametrize("head_norms", [False, True])
def test_rope_and_write_is_what_the_modules_do(head_norms: bool) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    from atlaslib.engine.cuda import kernels

    rows, heads, kv_heads, dim = 5, 6, 2, 32
    together = torch.randn(rows, (heads + 2 * kv_heads) * dim, device=DEVICE)
    query, key, value = together.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    cos, sin = torch.randn(rows, dim, device=DEVICE), torch.randn(rows, dim, device=DEVICE)
    norms = [Qwen3RMSNorm(dim, eps=1e-5).to(DEVICE) for _ in range(2)]
    for norm in norms:
        norm.weight.data.normal_(1.0, 0.3)
    cache = tuple(torch.zeros(4, 16, kv_heads, dim, device=DEVICE) for _ in range(2))
    slots = torch.tensor([3, -1, 63, 17, 0], device=DEVICE)
    q = kernels.rope_and_write(query, key, value, cos, sin, slots, cache, tuple(norms) if head_norms else None)
    parts = [x.view(1, rows, -1, dim) for x in (query, key)]
    if head_norms:
        parts = [norm(x) for norm, x in zip(norms, parts, strict=True)]
    expected_q, expected_k = apply_rotary_pos_emb(*(x.transpose(1, 2) for x in parts), cos[None], sin[None])
    torch.testing.assert_close(q, expected_q[0], atol=1e-5, rtol=1e-5)
    flat_keys, flat_values = (x.view(64, kv_heads, dim) for x in cache)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            torch.testing.assert_close(flat_keys[slot], expected_k[0, :, row], atol=1e-5, rtol=1e-5)
            assert torch.equal(flat_values[slot].view(-1), value[row])
    assert int((flat_keys.abs().sum((1, 2)) > 0).sum()) == 4


def make_info(rows: int, temperatures: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    info = torch.zeros(rows, 8, dtype=torch.int64, device=DEVICE)
    info[:, 0] = torch.arange(rows)
    info[:, 4] = torch.arange(rows)
    info[:, 5] = seeds
    info[:, 6] = temperatures.view(torch.int32).long()
    return info


def test_sampling_kernel_agrees_with_the_plain_functions() -> None:
    from atlaslib.engine.cuda import kernels
    from atlaslib.engine.sampling import inverse_cdf, token_logprobs, uniforms

    rows, vocab = 512, 50_257
    logits = (torch.randn(rows, vocab, device=DEVICE) * 3).bfloat16()
    temperatures = torch.rand(rows, device=DEVICE) + 0.5
    temperatures[:64] = 0.0
    seeds = torch.randint(0, 2**62, (rows,), device=DEVICE)
    info = make_info(rows, temperatures, seeds)
    out = torch.zeros(3, rows + 7, dtype=torch.int32, device=DEVICE)
    last = torch.zeros(rows + 1, dtype=torch.int64, device=DEVICE)
    kernels.sample_rows(logits, info, out, last)
    tokens = out[0, :rows].long()
    assert torch.equal(tokens, last[:rows])
    assert torch.equal(logits[:64].float().gather(1, tokens[:64, None])[:, 0], logits[:64].float().max(-1).values)
    weights = torch.softmax(logits.double() / temperatures.double().clamp(min=1e-9)[:, None], -1)
    expected = inverse_cdf(weights[64:], uniforms(seeds, info[:, 4])[64:])
    assert float((expected == tokens[64:]).float().mean()) > 0.98
    torch.testing.assert_close(
        out[1, :rows].view(torch.float32), token_logprobs(logits, tokens, temperatures), atol=2e-5, rtol=1e-5
    )
    torch.testing.assert_close(out[2, :rows].view(torch.float32), token_logprobs(logits, tokens), atol=2e-5, rtol=1e-5)


def test_sampling_kernel_draws_from_the_distribution() -> None:
    from atlaslib.engine.cuda import kernels

    rows = 20_000
    probs = torch.tensor([0.5, 0.2, 0.0, 0.05, 0.25], device=DEVICE)
    logits = torch.full((1, 9000), -torch.inf, device=DEVICE)
    places = torch.tensor([0, 4095, 4097, 4096, 8999], device=DEVICE)
    logits[0, places] = probs.log()
    info = make_info(rows, torch.ones(rows, device=DEVICE), torch.full((rows,), 77, device=DEVICE))
    out = torch.zeros(3, rows, dtype=torch.int32, device=DEVICE)
    kernels.sample_rows(
        logits.expand(rows, -1).contiguous(), info, out, torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    )
    shares = torch.bincount(out[0].long(), minlength=9000)[places] / rows
    torch.testing.assert_close(shares, probs, atol=0.015, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral_window", "gemma2", "gemma3", "smollm2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rollouts_have_the_log_probs_of_the_plain_forward(name: str, dtype: torch.dtype) -> None:
    from atlaslib.engine import Engine, EngineConfig, SamplingParams
    from atlaslib.models.zoo import tiny_causal_lm

    model = tiny_causal_lm(name).to(DEVICE, dtype)
    engine = Engine(model, config=EngineConfig(max_num_seqs=16, max_prefill_tokens=48, num_blocks=400))
    assert (engine.runner.fused is not None) == (not name.startswith("gemma"))
    prompts = [[5 + i, 9, 30 + i] * (3 + 4 * i) for i in range(6)]
    replies = engine.generate(prompts, SamplingParams(n=4, max_tokens=24, temperature=0.9, ignore_eos=True, seed=3))
    worst = 0.0
    for prompt, group in zip(prompts, replies, strict=True):
        for reply in group:
            whole = prompt + reply.token_ids
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([whole], device=DEVICE)).logits[0].float() / 0.9
            expected = torch.log_softmax(logits, -1)[torch.arange(len(whole) - 1), whole[1:]][len(prompt) - 1 :].cpu()
            worst = max(worst, float((expected - torch.tensor(reply.temperature_logprobs)).abs().max()))
    print(f"{name} {dtype}: max |d log-prob| {worst:.2e}")
    assert worst < (1e-3 if dtype == torch.float32 else 0.6)


def test_graphs_running_ahead_and_stop_tokens_change_nothing() -> None:
    from atlaslib.engine import Engine, EngineConfig, SamplingParams
    from atlaslib.models.zoo import tiny_causal_lm

    model = tiny_causal_lm("qwen2").to(DEVICE)
    prompts = [[3 + i, 8, 20 + i] for i in range(12)]
    params = [
        SamplingParams(n=2, max_tokens=10 + 3 * i, seed=i, stop_token_ids=list(range(100, 130))) for i in range(12)
    ]
    runs = []
    for graphs in (True, False):
        engine = Engine(
            model, config=EngineConfig(max_num_seqs=8, num_blocks=200, cuda_graphs=graphs, fused_kernels=graphs)
        )
        runs.append([reply for group in engine.generate(prompts, params) for reply in group])
        assert engine.stats()["running"] == 0
        assert engine.stats()["cache_used"] == 0.0
    assert [reply.token_ids for reply in runs[0]] == [reply.token_ids for reply in runs[1]]
    assert {reply.finish_reason for reply in runs[0]} == {"stop", "length"}
    for reply in runs[0]:
        assert all(token not in range(100, 130) for token in reply.token_ids[:-1])


def test_a_captured_prefill_reads_what_a_launched_one_reads() -> None:
    from atlaslib.engine import Engine, EngineConfig, SamplingParams
    from atlaslib.engine.cuda.layout import prefill_buckets
    from atlaslib.models.zoo import tiny_causal_lm

    model = tiny_causal_lm("qwen2").to(DEVICE)
    loads = [[[7 + i, 9, 30 + i] * (1 + length // 3)] for i, length in enumerate([1, 60, 64, 130, 200])]
    loads.append([[3 + i, 8, 20 + i] for i in range(50)])  # more prompts than the smallest graphs have room for
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    results = []
    for graphs in (True, False):
        engine = Engine(model, config=EngineConfig(max_num_seqs=64, max_prefill_tokens=2048, cuda_graphs=graphs))
        replays: list[int] = []
        for size, graph in list(engine.runner._prefill_graphs.items()):
            engine.runner._prefill_graphs[size] = Counted(size, graph, replays)
        results.append([[reply[0] for reply in engine.generate(prompts, params)] for prompts in loads])
        assert replays == ([64, 64, 128, 256, 256, 1792] if graphs else [])
        assert sorted(engine.runner._prefill_graphs) == (prefill_buckets(2048) if graphs else [])
    for captured, launched in zip(*results, strict=True):
        assert [reply.token_ids for reply in captured] == [reply.token_ids for reply in launched]
        for one, other in zip(captured, launched, strict=True):
            torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-4, rtol=0)


def test_capturing_again_leaves_the_cache_alone() -> None:
    from atlaslib.engine import Engine, EngineConfig
    from atlaslib.models.zoo import tiny_causal_lm

    runner = Engine(tiny_causal_lm("llama").to(DEVICE), config=EngineConfig(max_num_seqs=8, num_blocks=50)).runner
    for tensor in (*runner.cache.keys, *runner.cache.values):
        tensor.normal_()
    before = [tensor.clone() for tensor in (*runner.cache.keys, *runner.cache.values)]
    runner.warm_up()
    for tensor, expected in zip((*runner.cache.keys, *runner.cache.values), before, strict=True):
        assert torch.equal(tensor, expected)


def test_decode_steps_cover_the_launch_of_a_prefill() -> None:
    from atlaslib.engine import Engine, EngineConfig, SamplingParams
    from atlaslib.models.tiny import tiny_llama

    engine = Engine(tiny_llama(128, max_len=256).to(DEVICE), config=EngineConfig(max_num_seqs=8))
    runner = engine.runner
    assert 1 <= runner.decode_ahead(8) <= 20  # the check at start has launched one
    runner._launch_s = 2.5 * runner._step_s[8]
    assert runner.decode_ahead(7) == 3
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
    assert runner._launch_s <= 1.25 * 2.5 * runner._step_s[8]


def test_preemption_on_cuda_loses_nothing() -> None:
    from atlaslib.engine import Engine, EngineConfig, SamplingParams
    from atlaslib.models.zoo import tiny_causal_lm

    model = tiny_causal_lm("llama").to(DEVICE)
    prompts = [[3 + i, 8, 20 + i] for i in range(8)]
    params = SamplingParams(max_tokens=60, seed=5, ignore_eos=True)
    roomy = Engine(model, config=EngineConfig(max_num_seqs=8, num_blocks=200)).generate(prompts, params)
    tight = Engine(model, config=EngineConfig(max_num_seqs=8, num_blocks=14))
    replies = tight.generate(prompts, params)
    assert tight.stats()["preemptions"] > 0
    same = [a[0].token_ids == b[0].token_ids for a, b in zip(roomy, replies, strict=True)]
    assert sum(same) >= 7  # a recomputed key may differ in its last bits and tip a draw
    assert all(len(reply[0].token_ids) == 60 for reply in replies)


def test_an_update_in_place_is_seen_by_captured_graphs() -> None:
    from atlaslib.engine import Engine, EngineConfig, SamplingParams
    from atlaslib.models.zoo import tiny_causal_lm

    model = tiny_causal_lm("llama").to(DEVICE)
    engine = Engine(model, config=EngineConfig(max_num_seqs=8, num_blocks=100))
    with engine.updating(), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    reply = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=12, ignore_eos=True, seed=1))[0][0]
    assert reply.versions == [1] * 12
    scores = Engine(model, config=EngineConfig(max_num_seqs=8, num_blocks=100, cuda_graphs=False)).score(
        [[5, 6, 7, *reply.token_ids]]
    )[0]
    torch.testing.assert_close(torch.tensor(scores[3:]), torch.tensor(reply.logprobs), atol=1e-3, rtol=0)


def test_merged_weights_are_the_same_parameters_and_follow_new_storage() -> None:
    from atlaslib.engine import Engine, EngineConfig, SamplingParams
    from atlaslib.models.zoo import tiny_causal_lm

    model = tiny_causal_lm("qwen2").to(DEVICE)
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    engine = Engine(model, config=EngineConfig(max_num_seqs=8, num_blocks=100))
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])
    attention = model.model.layers[0].self_attn
    assert (
        attention.k_proj.weight.data_ptr() == attention.q_proj.weight.data_ptr() + attention.q_proj.weight.numel() * 4
    )
    with engine.updating():
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.2  # new storage, as some optimizers and loaders leave it
    reply = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True, seed=1))[0][0]
    whole = torch.tensor([[5, 6, 7, *reply.token_ids]], device=DEVICE)
    with torch.no_grad():
        expected = torch.log_softmax(model(input_ids=whole).logits[0].float(), -1)[torch.arange(2, 10), whole[0, 3:]]
    torch.testing.assert_close(expected.cpu(), torch.tensor(reply.logprobs), atol=1e-3, rtol=0)


def test_training_goes_on_through_merged_weights() -> None:
    from atlaslib.engine import Engine, EngineConfig
    from atlaslib.models.zoo import tiny_causal_lm

    plain, merged = (tiny_causal_lm("llama").to(DEVICE) for _ in range(2))
    engine = Engine(merged, config=EngineConfig(max_num_seqs=8, num_blocks=100))
    ids = torch.randint(3, 259, (2, 12), device=DEVICE)
    for model in (plain, merged):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
            with engine.updating():
                optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(plain.parameters(), merged.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_too_many_blocks_says_how_many_fit() -> None:
    from atlaslib.engine import Engine, EngineConfig
    from atlaslib.errors import EngineMemoryError
    from atlaslib.models.zoo import tiny_causal_lm

    with pytest.raises(EngineMemoryError, match=r"at most num_blocks=\d+ fits"):
        Engine(tiny_causal_lm("llama").to(DEVICE), config=EngineConfig(num_blocks=10**9))


def test_a_dropped_engine_gives_its_memory_back_at_once() -> None:
    import gc
    import weakref

    from atlaslib.engine import Engine, EngineConfig, SamplingParams
    from atlaslib.models.zoo import tiny_causal_lm

    engine = Engine(tiny_causal_lm("llama").to(DEVICE), config=EngineConfig(max_num_seqs=8, num_blocks=100))
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4))
    keys = weakref.ref(engine.runner.cache.keys[0])
    gc.disable()  # no cycle of references may keep the cache, or a second engine would find the device full
    try:
        del engine
        assert keys() is None
    finally:
        gc.enable()
