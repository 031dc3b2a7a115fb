"""How a linear layer keeps and applies its weights."""

from tgi_cli.quantization.base import QuantizationMethod
from tgi_cli.quantization.quantized import Quantized
from tgi_cli.quantization.unquantized import Unquantized

__all__ = ["QuantizationMethod", "Quantized", "Unquantized"]
