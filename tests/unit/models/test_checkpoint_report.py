"""What is said of a checkpoint before it is served."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools import quantized
from tests.tools.checkpoints import make_llama
from tests.tools.quantized import Layout, Written, write_quantized
from tgi_cli.errors import UnsupportedModelError
from tgi_cli.kernels import without_cpp_kernels
from tgi_cli.kernels.linear import multiplies_bytes
from tgi_cli.models.checkpoint_report import describe


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"), intermediate_size=192)


def test_a_plain_checkpoint(llama: Path) -> None:
    report = describe(llama, "cpu")
    assert report.method is None
    assert report.quantized == ()
    (kept,) = report.plain
    assert kept.how == "F32"
    assert report.num_bytes == 4 * kept.parameters
    assert next(report.lines()).startswith("LlamaForCausalLM, not quantized, ")


def test_widths_exceptions_and_what_is_plain(llama: Path, tmp_path: Path) -> None:
    four, eight = quantized.gptq(4, 32), quantized.gptq(8, 64)

    def write(module: str, tensor) -> Written:  # type: ignore[no-untyped-def]
        return (eight if module.endswith("1.mlp.down_proj") else four).write(module, tensor)

    layout = Layout(four.config, write)
    write_quantized(llama, tmp_path, layout, modules=r".*\.layers\.[01]\..*_proj")
    with without_cpp_kernels():
        report = describe(tmp_path, "cpu")
    assert report.method == "gptq"
    most, one = report.quantized
    assert (most.how, len(most.modules)) == ("4 bits, groups of 32", 13)
    assert 4.5 < 8 * most.num_bytes / most.parameters < 5.2
    assert most.kernel in ("torch's int4", "dense, as there are kernels for bfloat16, not float32")
    assert one.modules == ("model.layers.1.mlp.down_proj",)
    assert one.kernel is not None
    assert one.kernel.startswith("dense, as there")
    assert report.exceptions == {"model.layers.1.mlp.down_proj": "8 bits, groups of 64"}
    plain = [name for kept in report.plain for name in kept.modules]
    assert "model.layers.2.mlp.down_proj" in plain
    assert "model.embed_tokens" in plain
    assert report.num_bytes == pytest.approx(
        (tmp_path / "model.safetensors").stat().st_size, abs=20_000
    )
    text = "\n".join(report.lines())
    assert "13 weights in 4 bits, groups of 32" in text
    assert "model.layers.1.mlp.down_proj: 8 bits, groups of 64" in text


@pytest.mark.parametrize(
    ("layout", "integers"), [(quantized.gptq(4, 32), True), (quantized.fp8("channel"), False)]
)
def test_kernels_are_those_that_serve_by_default(
    layout: Layout, integers: bool, llama: Path, tmp_path: Path
) -> None:
    write_quantized(llama, tmp_path, layout)
    (found,) = describe(tmp_path, "cpu").quantized
    assert found.kernel is not None
    rounds = integers and multiplies_bytes()
    assert (", activations of 8 bits" in found.kernel) == rounds


def test_unreadable_quantization_is_refused(llama: Path, tmp_path: Path) -> None:
    layout = quantized.gptq(4, 32)
    write_quantized(llama, tmp_path, Layout({"quant_method": "exl2"}, layout.write))
    with pytest.raises(UnsupportedModelError, match="exl2"):
        describe(tmp_path)
