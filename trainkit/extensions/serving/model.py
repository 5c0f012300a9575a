"""ServedModel: an exported file that answers lists of samples;
requests are read here, without a web framework.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from trainkit.errors import ConfigError
from trainkit.extensions.exporting import onnx, program
from trainkit.extensions.exporting.description import InputTensor, read_description
from trainkit.extensions.serving.body import RequestError, refuse_constant
from trainkit.extensions.serving.failures import is_of_device, is_out_of_memory

Sample = tuple[Tensor, ...]  # the arguments of the forward, without their rows' dimension
_LOADERS: dict[str, Callable[[Path], Callable[..., Any]]] = {
    ".pt2": program.load,
    ".onnx": onnx.load,
}
_log = logging.getLogger("trainkit")
_MOST_PIXELS = 50_000_000
_JPEG = b"\xff\xd8"


class ServedModel:
    """An exported file and its description.

    Attributes:
        path: the file.
        description: what its input is.
        fault: why the device can be used no more; "" while it can.
    """

    def __init__(self, path: Path) -> None:
        """Load the file.

        Raises:
            ConfigError: it is no export that can be called, or has no description.
        """
        if path.suffix not in _LOADERS:
            raise ConfigError(
                f"{path} cannot be served: it must be a .pt2 or .onnx file. Export one: python -m"
                " trainkit export ckpt_path=best run_dir=RUN format=torch_export."
            )
        self.path = path
        self.fault = ""
        self.description = read_description(path)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch about its own code
                self._forward = _LOADERS[path.suffix](path)
        except Exception as error:  # any: a file of another kind
            raise ConfigError(
                f"{path} cannot be loaded: {program.first_line(error)}. Export it again."
            ) from error
        self._rows = [i for i in self.description.inputs if i.has_rows]
        if len(self._rows) != len(self.description.inputs):
            raise ConfigError(
                f"{path} cannot be served: an argument of its forward has no row for each sample."
            )

    def samples_of_json(self, body: bytes) -> list[Sample]:
        """Return the samples of {"inputs": one sample, or a list of samples}; with several
        arguments a list of these.

        Raises:
            RequestError: it is something else.
        """
        try:
            content = json.loads(body, parse_constant=refuse_constant)
        except (ValueError, RecursionError) as error:
            raise RequestError(400, f"The body is no JSON: {error}.") from None
        if not isinstance(content, dict) or set(content) != {"inputs"}:
            raise RequestError(400, 'The body must be {"inputs": ...}, and nothing else.')
        given = [content["inputs"]] if len(self._rows) == 1 else content["inputs"]
        if not isinstance(given, list) or len(given) != len(self._rows):
            raise RequestError(
                400,
                f"inputs must be a list of {len(self._rows)} arrays, one for each argument of the"
                " model.",
            )
        columns = [_rows(value, one) for value, one in zip(given, self._rows, strict=True)]
        if len({len(column) for column in columns}) != 1:
            raise RequestError(
                400,
                f"The arrays of inputs have {[len(column) for column in columns]} samples; they"
                " must be as many.",
            )
        if not len(columns[0]):
            raise RequestError(400, "inputs has no samples.")
        return list(zip(*columns, strict=True))

    def sample_of_picture(self, body: bytes) -> Sample:
        """Return a JPEG or PNG as a sample, transformed as in validation.

        Raises:
            RequestError: it is no picture, or the model takes none.
        """
        how = self.description.image
        if how is None:
            raise RequestError(
                415,
                'This model takes no pictures: its export does not say how. Send JSON: {"inputs":'
                " ...}.",
            )
        pixels = v2.functional.resize(_decode(body), [how.resize], antialias=True)
        image = v2.functional.to_dtype(
            v2.functional.center_crop(pixels, [how.crop, how.crop]), torch.float32, scale=True
        )
        return (v2.functional.normalize(image, list(how.mean), list(how.std)),)

    def answer(self, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """Return the prediction of each sample.

        Raises:
            RequestError: the model refuses a sample, memory is short, or the device has failed.
        """
        if self.fault:
            raise RequestError(500, self.fault)
        size = self.description.batch_size
        predictions: list[dict[str, Any]] = []
        try:
            for start in range(0, len(samples), size or len(samples)):
                part = samples[start : start + (size or len(samples))]
                padded = [part[i % len(part)] for i in range(size)] if size else part
                predictions += self._answer(padded)[: len(part)]
        except Exception as error:
            self._raise_own(error, len(samples))
            raise
        return predictions

    def _raise_own(self, error: Exception, num_samples: int) -> None:
        """Raise what a client reads of an error that is the server's."""
        if is_of_device(error):
            reason = program.first_line(error)
            self.fault = f"The model's device has failed ({reason}). Restart the service."
            _log.error(self.fault)
            raise RequestError(500, self.fault) from error
        if is_out_of_memory(error):
            _log.warning(
                f"Out of memory in a call of {num_samples} samples: {program.first_line(error)}"
            )
            if num_samples == 1:
                text = "The server has too little memory for this call. Try again later."
                raise RequestError(503, text) from error

    def _answer(self, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        try:
            with torch.inference_mode():
                output = self._forward(
                    *(torch.stack(column) for column in zip(*samples, strict=True))
                )
        except Exception as error:  # any of the model's: an index out of range, for example
            is_own = is_of_device(error) or is_out_of_memory(error)
            if is_own or (len(samples) > 1 and self.description.batch_size is None):
                raise
            raise RequestError(
                400, f"The model refuses this input: {program.first_line(error)}."
            ) from error
        scores = None
        if (
            self.description.classes is not None
            and isinstance(output, Tensor)
            and output.dim() == 2
        ):
            scores = output.float().softmax(1)
        return [self._prediction(output, scores, place) for place in range(len(samples))]

    def _prediction(self, output: Any, scores: Tensor | None, place: int) -> dict[str, Any]:
        prediction = {"output": _row(output, place)}
        if scores is not None and self.description.classes is not None:
            best = int(scores[place].argmax())
            names = self.description.classes
            prediction |= {
                "class": names[best] if best < len(names) else str(best),
                "probability": float(scores[place, best]),
            }
        return prediction


def _rows(value: Any, one: InputTensor) -> Tensor:
    """Return an array as samples in rows; one sample becomes a row."""
    wanted = f"{list(one.shape)} of {one.dtype}"
    try:
        tensor = torch.tensor(value)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise RequestError(
            400, f"inputs is no array of numbers of equal lengths ({error}); a sample is {wanted}."
        ) from None
    dtype: torch.dtype = getattr(torch, one.dtype)
    if (
        tensor.numel()
        and not dtype.is_floating_point
        and (tensor.is_floating_point() or tensor.dtype is torch.bool)
        and dtype is not torch.bool
    ):
        raise RequestError(
            400,
            f"inputs has numbers of {str(tensor.dtype).removeprefix('torch.')}; a sample is"
            f" {wanted}.",
        )
    shape = tuple(tensor.shape)
    if shape != one.shape and (shape[1:] != one.shape or not shape):
        raise RequestError(
            400,
            f"inputs has shape {list(shape)}; a sample is {wanted}, and several are [N, ...]"
            " of it.",
        )
    # Not from `tensor` if that has rounded to float32.
    rows = torch.tensor(value, dtype=dtype) if tensor.is_floating_point() else tensor.to(dtype)
    fits = rows.isfinite() if dtype.is_floating_point else rows == tensor
    if dtype is not torch.bool and not fits.all():
        raise RequestError(
            400, f"inputs has numbers beyond the range of {one.dtype}; a sample is {wanted}."
        )
    return rows.unsqueeze(0) if shape == one.shape else rows


def _decode(body: bytes) -> Tensor:
    """Return RGB, uint8 [3, height, width]."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(body)) as image:
                if image.width * image.height > _MOST_PIXELS:
                    raise RequestError(
                        413,
                        f"The picture has {image.width} x {image.height} pixels; {_MOST_PIXELS:,}"
                        " are the most.",
                    )
                if body.startswith(_JPEG) and image.mode == "RGB":
                    pixels: Tensor = decode_jpeg(
                        torch.frombuffer(bytearray(body), dtype=torch.uint8), ImageReadMode.RGB
                    )
                else:
                    pixels = v2.functional.pil_to_tensor(image.convert("RGB"))
                return pixels
    except Image.DecompressionBombError as error:
        raise RequestError(413, f"The picture is too large: {error}") from None
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError, RuntimeError) as error:
        reason = (
            "its format is not known"
            if isinstance(error, UnidentifiedImageError)
            else program.first_line(error)
        )
        raise RequestError(400, f"The body is no picture that can be decoded: {reason}.") from None


def _row(output: Any, place: int) -> Any:
    if isinstance(output, Tensor):
        return output[place].tolist() if output.dim() else output.item()
    if isinstance(output, dict):
        return {str(name): _row(item, place) for name, item in output.items()}
    return [_row(item, place) for item in output if item is not None]
