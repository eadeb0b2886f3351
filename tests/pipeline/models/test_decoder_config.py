import pytest

from contracts.errors import ConfigError
from pipeline.models.config import DecoderConfig

SIZES = {"vocab_size": 8, "width": 8, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 4, "mlp_width": 8}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": 0}, "layers must be positive, got 0"),
        ({"norm_eps": 0.0}, "norm_eps must be positive"),
        ({"rope_theta": float("nan")}, "rope_theta must be positive"),
        ({"heads": 3, "kv_heads": 2}, "heads=3 cannot be grouped over kv_heads=2"),
        ({"head_dim": 5}, "head_dim=5 is odd"),
        ({"dtype": "float16"}, "dtype='float16' is unknown"),
    ],
)
def test_a_decoder_that_cannot_exist_is_refused_with_its_numbers(change, words):
    with pytest.raises(ConfigError, match=words):
        DecoderConfig(**{**SIZES, **change})


def test_query_heads_may_be_wider_than_the_residual_stream():
    assert DecoderConfig(**{**SIZES, "heads": 4, "head_dim": 8}).width == 8
