"""Weight formats of linear layers: reading, storing and multiplying quantized weights."""

from tgi_cli.quantization.base import QuantizationMethod
from tgi_cli.quantization.quantized import Quantized
from tgi_cli.quantization.unquantized import Unquantized

__all__ = ["QuantizationMethod", "Quantized", "Unquantized"]
