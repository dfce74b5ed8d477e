"""Run: Model, Cluster, Layout and Recipe together; reading it from YAML and the command line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import model_validator

from shardwise.spec.cluster import Cluster
from shardwise.spec.huggingface import load_model_config
from shardwise.spec.layout import Layout
from shardwise.spec.model import Model
from shardwise.spec.noun import InputError, Noun, nearest
from shardwise.spec.presets import model_names, model_preset
from shardwise.spec.recipe import Recipe

_YAML = (".yaml", ".yml")


class Run(Noun):
    """One file that goes all the way round: `plan` writes it, the other verbs read it. It never changes."""

    model: Model
    cluster: Cluster
    layout: Layout | Literal["auto"] = "auto"
    recipe: Recipe

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise ValueError("a Run is a mapping with model, cluster, layout and recipe")
        data = dict(data)
        if "model" in data:
            data["model"] = _expand_model(data["model"])
        # Validated here, so that its errors are Layout's own and not those of a union.
        if "layout" in data and not isinstance(data["layout"], Layout) and data["layout"] != "auto":
            if isinstance(data["layout"], str):
                raise ValueError(f"layout '{data['layout']}' is neither 'auto' nor a mapping of degrees")
            data["layout"] = Layout.load(data["layout"] or {}, "layout")
        return data

    @property
    def fixed_layout(self) -> Layout:
        """The layout, once it is no longer 'auto'."""
        if isinstance(self.layout, str):
            raise InputError("layout: 'auto' has not been resolved yet")
        return self.layout

    def replace(self, **nouns: Any) -> Self:
        """A copy with some of its nouns exchanged."""
        return self.model_copy(update=nouns)

    def to_yaml(self, *, whole: bool = True) -> str:
        """The Run file. Not whole: for people, without the rows of a calibration."""
        data, found = self.dump(), self.cluster.gpu.calibration
        if found and not whole:
            data["cluster"]["gpu"]["calibration"] = found.source
        text: str = yaml.dump(data, sort_keys=False, default_flow_style=None, width=110)
        return text


def _expand_model(value: Any) -> Any:
    """A preset's name, the path of a config.json or of a YAML file, or a mapping that may start from one of them
    (`preset: gpt2-124m`), as a Model or a plain mapping."""
    if isinstance(value, str):
        return _named_model(value)
    if isinstance(value, dict) and "preset" in value:
        changes = {key: item for key, item in value.items() if key != "preset"}
        return {**_named_model(str(value["preset"])).dump(), **changes}
    return value


def _named_model(name: str) -> Model:
    try:
        path = Path(name).expanduser()
        is_path = path.name != name or path.suffix in (".json", *_YAML) or path.exists()
    except (OSError, RuntimeError):  # it may not be looked at; or `~name` of no user
        is_path = False
    if not is_path or name in model_names():
        return model_preset(name)
    return _model_of_file(path) if path.suffix in _YAML else load_model_config(path)


def _model_of_file(path: Path) -> Model:
    """The Model of a YAML file: of a Run if it has a `model`, else its fields are a Model's own, named after the file.
    Raises InputError naming the file."""
    data = read_yaml(path)
    if not isinstance(data, dict):
        raise InputError(f"{path}: a Model's fields, or a Run, is expected")
    value = data.get("model", data)
    start = value.get("preset") if isinstance(value, dict) else value
    if isinstance(start, str) and Path(start).suffix in _YAML:
        raise InputError(f"{path}: its model is in another YAML file, {start}; give that one")
    try:
        expanded = _expand_model(value)
        if isinstance(expanded, dict) and value is data and "preset" not in data:
            expanded = {"name": path.stem, **expanded}
        return expanded if isinstance(expanded, Model) else Model.load(expanded)
    except InputError as error:
        raise InputError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None


class _StrictLoader(yaml.CSafeLoader):
    """Refuses a key that stands twice: plain YAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if key in seen and key != "<<":
                raise yaml.constructor.ConstructorError(None, None, f"'{key}' stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path) -> Any:
    """The file's plain data. Raises InputError naming the file, and the line where YAML is broken."""
    path = Path(path)
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except FileNotFoundError:
        around = [entry.name for entry in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        near = nearest(path.name, around)
        raise InputError(f"{path}: no such file" + (f"; did you mean {path.parent / near}?" if near else "")) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise InputError(f"{path}{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None


def load_run(source: str | Path | dict[str, Any], overrides: Iterable[tuple[str, str]] = ()) -> Run:
    """Read a Run: defaults < file < overrides such as `("recipe.steps", "40")`. Raises InputError."""
    data = source if isinstance(source, dict) else read_yaml(source)
    if not isinstance(data, dict):
        raise InputError(f"{source}: a Run is a mapping with model, cluster, layout and recipe")
    for path, text in overrides:
        data = _set(data, path.split("."), _parse(path, text), path)
    return Run.load(data)


def _parse(path: str, text: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError:
        raise InputError(f"--{path}: cannot be read as YAML: {text!r}") from None


def _set(data: Any, keys: list[str], value: Any, path: str) -> dict[str, Any]:
    """A copy of nested mappings with one value set. A name standing where a mapping is needed is expanded first."""
    key, *rest = keys
    if isinstance(data, str):  # `model: tiny-llama` with --model.layers 2; `layout: auto` with --layout.tp 2
        parent = path.split(".")[0]
        data = {{"model": "preset", "cluster": "file"}[parent]: data} if parent in ("model", "cluster") else {}
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise InputError(f"--{path}: '{key}' cannot be set, because what holds it is {data!r}")
    return {**data, key: _set(data.get(key), rest, value, path) if rest else value}
