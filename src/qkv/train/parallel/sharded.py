"""Checkpoints in pieces: every process writes what it has, and any number of processes reads it.

    run/checkpoints/00000100/   shards/        model/NAME, optimizer/NAME/KEY, ema/NAME, in torch's distributed format
                                state.json     step, and where the data is

A piece says where in which tensor it lies, so that other processes, or one alone, take what they need, and no process
ever holds the whole. An ordinary checkpoint is read by divided models, too: each process takes its piece of it.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from qkv.checkpoint.whole_folder import whole_folder
from qkv.errors import CheckpointError
from qkv.model import TextModel
from qkv.nn import Transformer
from qkv.train import checkpoints
from qkv.train.parallel.pieces import local, piece
from qkv.train.parallel.strategy import SHARDS, is_sharded

_MODEL, _OPTIMIZER, _EMA = "model", "optimizer", "ema"

__all__ = ["gathered", "is_sharded", "kind_of", "read", "read_whole", "write"]


def kind_of(tensor: Tensor) -> Any:
    """How a tensor is divided: equal for tensors that torch moves together."""
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def write(run: Path, model: Transformer, optimizer: Optimizer, saved: checkpoints.Saved) -> None:
    """Save a checkpoint; all processes at once."""
    target, main = run / "checkpoints" / f"{saved.step:08d}", dist.get_rank() == 0
    content: dict[str, Any] = _weights(model)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            content[f"{_OPTIMIZER}/{name}/{key}"] = value
    for name, value in saved.training.get(_EMA, {}).items():
        content[f"{_EMA}/{name}"] = value
    with ExitStack() as stack:
        place = [str(stack.enter_context(whole_folder(target)))] if main else [""]
        dist.broadcast_object_list(place, src=0)
        try:
            save(content, checkpoint_id=Path(place[0]) / SHARDS)
        except CheckpointException as error:
            what = checkpoints.in_a_line(_cause(error))
            raise CheckpointError(f"{target}: cannot be written ({what}); is the disk full?") from None
        if main:
            state = json.dumps({"step": saved.step, "data": saved.data})
            (Path(place[0]) / checkpoints.STATE).write_text(state, encoding="utf-8")


def read(folder: Path, model: Transformer, optimizer: Optimizer) -> checkpoints.Saved:
    """Take weights and optimizer from pieces; the averages, if there are any, are given back."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    try:
        state = json.loads((folder / checkpoints.STATE).read_text(encoding="utf-8"))
        stored = FileSystemReader(folder / SHARDS).read_metadata().state_dict_metadata
        content: dict[str, Any] = _weights(model)
        for path, about in stored.items():
            part, name, *_ = path.split("/")
            if part != _MODEL:
                assert isinstance(about, TensorStorageMetadata)
                content[path] = _room(parameters[name], about)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
            load(content, checkpoint_id=folder / SHARDS, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise checkpoints.damaged(folder, _cause(error)) from None
    except (OSError, EOFError, ValueError, KeyError, RuntimeError, pickle.UnpicklingError) as error:
        raise checkpoints.damaged(folder, error) from None
    ours, averages = dict(model.named_parameters()), {}
    for path, value in content.items():
        part, name, *key = path.split("/")
        if part == _OPTIMIZER:
            optimizer.state[ours[name]][key[0]] = value
        elif part == _EMA:
            averages[name] = value
    return checkpoints.Saved(state["step"], state["data"], {"adapters": {}, "scaler": {}, _EMA: averages})


def _cause(error: CheckpointException) -> BaseException:
    """What went wrong on the first process on which something did."""
    return error.failures[min(error.failures)][0]


def _weights(model: Transformer) -> dict[str, Any]:
    return {f"{_MODEL}/{name}": parameter.detach() for name, parameter in model.named_parameters()}


def _room(parameter: Tensor, about: TensorStorageMetadata) -> Tensor:
    """Where a tensor of the optimizer will be: like its parameter, unless it is a count."""
    if about.size == parameter.shape:
        return torch.zeros_like(parameter)
    return torch.zeros(about.size, dtype=about.properties.dtype)


def read_whole(
    folder: Path, model: Transformer, optimizer: Optimizer, order: Sequence[nn.Parameter]
) -> checkpoints.Saved:
    """Take this process's pieces of an ordinary checkpoint; `order`: of the parameters that its optimizer counts."""
    saved, weights = checkpoints.read(folder), checkpoints.weights(folder)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            local(parameter).copy_(piece(weights[name], parameter))
    for number, values in saved.training[_OPTIMIZER]["state"].items():
        parameter = order[number].detach()
        optimizer.state[order[number]] = {key: _taken(value, parameter) for key, value in values.items()}
    averages = {name: _taken(value, parameters[name]) for name, value in saved.training.get(_EMA, {}).items()}
    return checkpoints.Saved(saved.step, saved.data, {**saved.training, _EMA: averages})


def _taken(whole: Any, parameter: Tensor) -> Any:
    """This process's piece of what belongs to a parameter; counts stay as they are."""
    if not isinstance(whole, Tensor) or whole.shape != parameter.shape:
        return whole
    room = torch.zeros_like(parameter.detach())
    local(room).copy_(piece(whole, parameter))
    return room


def gathered(lm: TextModel, main: bool) -> TextModel | None:
    """The whole model on the main process, one tensor after the other; None on the others."""
    weights = {}
    for name, parameter in lm.model.named_parameters():
        own = parameter.detach()
        whole = own.full_tensor() if isinstance(own, DTensor) else own
        if main:
            weights[name] = whole.cpu()
    if not main:
        return None
    model = Transformer(lm.config)
    model.load_state_dict(weights)
    return TextModel(model, lm.tokenizer, lm.family, token_ids=lm.token_ids)
