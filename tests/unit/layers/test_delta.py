"""The mixer of Gated DeltaNet against transformers' module, whole and in shares."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from tests.tools.state_steps import CPU, Run, make_states, run_mixed, run_whole
from tests.tools.thread_shards import on_shards
from tgi_cli.attention import PagedAttention, StateCache, create_attention
from tgi_cli.device.distributed import ALONE, Shard
from tgi_cli.errors import UnsupportedModelError
from tgi_cli.layers import Build, Loadable
from tgi_cli.layers.delta import DeltaNet
from tgi_cli.quantization import Unquantized

HIDDEN, KEY_DIM, VALUE_DIM, TAPS = 32, 8, 12, 4
LENGTHS = (1, 30, 5, 17)


def theirs(key_heads: int, value_heads: int) -> Qwen3_5GatedDeltaNet:
    config = Qwen3_5TextConfig(
        hidden_size=HIDDEN,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=KEY_DIM,
        linear_value_head_dim=VALUE_DIM,
        linear_conv_kernel_dim=TAPS,
        rms_norm_eps=1e-3,
        layer_types=["linear_attention"],
        num_hidden_layers=1,
    )
    module = Qwen3_5GatedDeltaNet(config, 0).float().eval()
    for parameter in module.parameters():
        parameter.data.normal_(std=0.5)
    return module


def ours(module: Qwen3_5GatedDeltaNet, shard: Shard = ALONE) -> DeltaNet:
    key_heads, value_heads = module.num_k_heads, module.num_v_heads
    build = Build(torch.float32, Unquantized(), shard)
    net = DeltaNet(
        build, 0, HIDDEN, key_heads, value_heads, KEY_DIM, VALUE_DIM, TAPS, norm_eps=1e-3
    )
    sizes = [key_heads * KEY_DIM, key_heads * KEY_DIM, value_heads * VALUE_DIM]
    projections = module.in_proj_qkv.weight.split(sizes)
    convolutions = module.conv1d.weight.split(sizes)
    tensors = {
        "z_proj.weight": module.in_proj_z.weight,
        "b_proj.weight": module.in_proj_b.weight,
        "a_proj.weight": module.in_proj_a.weight,
        "A_log": module.A_log,
        "dt_bias": module.dt_bias,
        "norm.weight": module.norm.weight,
        "out_proj.weight": module.out_proj.weight,
    }
    for part, projection, convolution in zip("qkv", projections, convolutions, strict=True):
        tensors[f"{part}_proj.weight"] = projection
        tensors[f"{part}_conv.weight"] = convolution
    with torch.inference_mode():
        for path, layer in net.named_modules():
            if isinstance(layer, Loadable):
                layer.materialize(CPU)
                for slot in layer.slots(f"net.{path}"):
                    assert slot.shape == tensors[slot.name.removeprefix("net.")].shape
                    slot.fill(tensors[slot.name.removeprefix("net.")])
                layer.finish()
    return net


def seat(states: StateCache) -> PagedAttention:
    attention = create_attention("torch", [], 16, torch.float32, CPU)
    attention.states = states
    return attention


def run_of(net: DeltaNet, hidden: Tensor, states: StateCache) -> Run:
    attention = seat(states)

    def run(rows: Tensor) -> Tensor:
        with torch.inference_mode():
            return net(hidden[rows], None, attention)

    return run


def wanted(module: Qwen3_5GatedDeltaNet, hidden: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.cat([module(text[None])[0] for text in hidden.split(LENGTHS)])


@pytest.mark.parametrize("heads", [(2, 4), (2, 2), (1, 3)])
def test_the_layer_is_transformers_however_its_texts_are_cut(heads: tuple[int, int]) -> None:
    torch.manual_seed(0)
    module, hidden = theirs(*heads), torch.randn(sum(LENGTHS), HIDDEN)
    net = ours(module)
    states = make_states(*net.state_spec.tensors)
    whole = run_whole(states, LENGTHS, run_of(net, hidden, states))
    torch.testing.assert_close(whole, wanted(module, hidden), atol=1e-4, rtol=1e-4)
    states = make_states(*net.state_spec.tensors)
    mixed = run_mixed(states, LENGTHS, run_of(net, hidden, states), exact=False)
    torch.testing.assert_close(mixed, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("heads", [(2, 4), (4, 4), (1, 2)])
def test_shards_have_a_share_of_the_heads_and_their_states(heads: tuple[int, int]) -> None:
    torch.manual_seed(0)
    module, hidden = theirs(*heads), torch.randn(sum(LENGTHS), HIDDEN)

    def work(shard: Shard) -> tuple[Tensor, int]:
        net = ours(module, shard)
        states = make_states(*net.state_spec.tensors)
        mixed = run_whole(states, LENGTHS, run_of(net, hidden, states))
        return mixed, net.state_spec.tensors[1].shape[0]

    for output, own in on_shards(2, work):
        torch.testing.assert_close(output, wanted(module, hidden), atol=1e-4, rtol=1e-4)
        assert own == heads[1] // 2


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    module = theirs(1, 3)
    with pytest.raises(UnsupportedModelError, match="3 heads"):
        ours(module, Shard(0, 2))


def test_what_a_sequence_keeps_is_of_the_dtypes_that_checkpoints_were_trained_with() -> None:
    build = Build(torch.bfloat16, Unquantized())
    net = DeltaNet(build, 0, HIDDEN, 2, 4, KEY_DIM, VALUE_DIM, TAPS)
    conv, recurrent = net.state_spec.tensors
    channels = 2 * 2 * KEY_DIM + 4 * VALUE_DIM
    assert (conv.shape, conv.dtype) == ((TAPS - 1, channels), torch.bfloat16)
    assert (recurrent.shape, recurrent.dtype) == ((4, KEY_DIM, VALUE_DIM), torch.float32)
