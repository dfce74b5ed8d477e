"""A Hugging Face config.json as a Model, and back. No torch and no transformers.

Every key of a config.json is either translated, or checked to have a value that shardwise computes, or known to change
nothing; any other is refused, so that no field that changes the computation is passed over.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from shardwise.spec.families import FAMILIES, INERT, QWEN_WINDOW, ROPE, ROPE_KEYS, Family
from shardwise.spec.model import Model
from shardwise.spec.noun import InputError, nearest, unknown
from shardwise.spec.numbers import parse_count
from shardwise.spec.rope import ROPE_SCALINGS, YarnScaling

CONFIG = "config.json"
_MAY_BE_NULL = ("num_key_value_heads", "head_dim", "sliding_window", "n_inner", "q_lora_rank")
_WINDOWED = ("qwen2", "qwen3")  # may have windows on some layers only
_TRAINING_ONLY = ("experts.capacity_factor",)  # drops nothing in a forward pass for logits


def load_model_config(path: str | Path) -> Model:
    """The Model that a config.json (or the directory that holds it) describes, named after its directory.

    Reads the families of FAMILIES, as transformers 4 and 5 write them. Raises InputError naming the key.
    """
    path = Path(path)
    path = path / CONFIG if path.is_dir() else path
    config = _read(path)
    name = str(config.get("model_type", ""))
    if name not in FAMILIES:
        near = nearest(name, FAMILIES)
        raise InputError(
            f"{path}: model_type '{name}' is none of the families that shardwise reads ({', '.join(FAMILIES)})"
            + (f"; nearest: {near}" if near else "")
        )
    family = FAMILIES[name]
    try:
        values = _translate(name, family, config)
        return Model.load({"name": path.absolute().parent.name or name, **values})
    except InputError as error:
        raise InputError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None


def model_config(model: Model) -> dict[str, Any]:
    """The config.json of a Model, in the form that transformers 4 and 5 both read.

    Raises InputError where no family of FAMILIES has such a model, naming what differs from the nearest one.
    """
    differences = {name: _differences(name, family, model) for name, family in FAMILIES.items()}

    def distance(name: str) -> tuple[bool, int]:
        routed = ("experts.count",) in FAMILIES[name].fields.values()
        return routed != (model.experts is not None), len(differences[name])

    name = min(differences, key=distance)
    if differences[name]:
        raise InputError(
            f"no family of transformers that shardwise writes ({', '.join(FAMILIES)}) has this model; "
            f"nearest: {name}, but {'; '.join(differences[name])}"
        )
    family = FAMILIES[name]
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": name}
    config |= {key: _value(model, fields[0]) for key, fields in family.fields.items()}
    if name == "gpt2":
        return config | {"activation_function": "gelu_new", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config |= {"hidden_act": "silu", "rope_theta": model.rope_theta}
    if model.rope_scaling:
        scaling = {key: value for key, value in model.rope_scaling.dump().items() if value != 0.0}
        theirs = {ours: key for key, ours in ROPE_KEYS.items()}
        config["rope_scaling"] = {"rope_type": scaling.pop("kind")} | {theirs[k]: v for k, v in scaling.items()}
    if name in _WINDOWED and model.sliding_window:
        config |= {"use_sliding_window": True, "sliding_window": model.sliding_window, "max_window_layers": 0}
    if name == "qwen3_moe":
        config |= {"mlp_only_layers": list(range(_value(model, "experts.dense_layers"))), "decoder_sparse_step": 1}
    if name == "deepseek_v3":
        config |= _deepseek(model, config)
    return config


def _deepseek(model: Model, config: dict[str, Any]) -> dict[str, Any]:
    """What its config.json has beside Family.fields, from those. DeepSeek's own code reads mscale, not
    attention_factor."""
    extra = {
        "q_lora_rank": config["q_lora_rank"] or None,
        "n_shared_experts": _value(model, "experts.shared_ffn") // config["moe_intermediate_size"],
        "num_key_value_heads": model.heads,
        "num_nextn_predict_layers": 0,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    scaling = model.rope_scaling
    if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim and scaling.factor > 1:
        over = (scaling.magnitude * math.sqrt(scaling.score_factor) - 1.0) / (0.1 * math.log(scaling.factor))
        extra["rope_scaling"] = {**config["rope_scaling"], "mscale": over}
    return extra


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give a Hugging Face config.json or its directory") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"{path}: is not a Hugging Face config.json: a mapping is expected")
    return config


def _translate(name: str, family: Family, config: dict[str, Any]) -> dict[str, Any]:
    """The Model's fields, before their own validation."""
    config = _spelled(family, config)
    known = {*family.fields, *family.only, *family.special, *family.inert}
    known |= set(ROPE if name != "gpt2" else ()) | set(QWEN_WINDOW if name in _WINDOWED else ())
    for key, value in config.items():
        if key in family.only and value not in family.only[key]:
            works = " or ".join(json.dumps(value) for value in family.only[key])
            raise InputError(f"{key} {json.dumps(value)} is not something that shardwise computes; what works: {works}")
        if key not in known | INERT:
            near = nearest(key, known)
            raise InputError(
                f"unknown field '{key}' of a {name}"
                + (f"; did you mean '{near}'?" if near else "; if it changes nothing in the model, remove it")
            )
    values: dict[str, Any] = dict(family.fixed)
    for key, fields in family.fields.items():
        value = config.get(key, family.defaults.get(key))
        if value is None and key not in _MAY_BE_NULL:
            raise InputError(f"{key} is required")
        is_switch = isinstance(family.defaults.get(key), bool)
        if value is not None and (is_switch != isinstance(value, bool) or not isinstance(value, int | float)):
            raise InputError(f"{key}: {'true or false' if is_switch else 'a number'} is expected (it was {value!r})")
        if value is not None:
            values |= dict.fromkeys(fields, value)
    if name == "gpt2":
        return {"ffn": 4 * values["hidden"], **values}
    values["rope_theta"], values["rope_scaling"] = _rope(config, family.theta)
    if name in _WINDOWED:
        values["sliding_window"] = _qwen_window(config)
    if name == "qwen3_moe":
        values["experts.dense_layers"] = _dense_layers(config)
    if name == "deepseek_v3":
        values.setdefault("latent.query_rank", 0)
        values["experts.shared_ffn"] = _count(config, "n_shared_experts", 1) * values["experts.ffn"]
        if _count(config, "num_key_value_heads", values["heads"]) != values["heads"]:
            raise InputError(
                f"num_key_value_heads {config['num_key_value_heads']} is not num_attention_heads {values['heads']}, "
                "but every head of latent attention has a key of its own"
            )
    return _nested(values)


def _spelled(family: Family, config: dict[str, Any]) -> dict[str, Any]:
    """The config with one spelling of each key. Raises InputError where two are given and differ."""
    config = dict(config)
    for other, key in family.aliases.items():
        if other in config and config.setdefault(key, config[other]) != config.pop(other):
            raise InputError(f"{key} and {other} are both given, and differ")
    return config


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """{"experts.count": 8} -> {"experts": {"count": 8}}"""
    nested: dict[str, Any] = {}
    for path, value in values.items():
        outer, _, inner = path.rpartition(".")
        (nested.setdefault(outer, {}) if outer else nested)[inner] = value
    return nested


def _dense_layers(config: dict[str, Any]) -> int:
    """How many layers, the first ones, have no experts."""
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or sorted(dense) != list(range(len(dense))):
        raise InputError(f"mlp_only_layers {dense}: shardwise does dense layers before all those with experts only")
    return len(dense)


def _qwen_window(config: dict[str, Any]) -> int | None:
    """The window where all layers have it, None where none has. Raises InputError where only some have."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    layers, first = _count(config, "num_hidden_layers"), _count(config, "max_window_layers", 28)
    types = config.get("layer_types")
    if types is None:
        types = ["sliding_attention" if window and index >= first else "full_attention" for index in range(layers)]
    if types == ["full_attention"] * layers:
        return None
    if window and types == ["sliding_attention"] * layers:
        return _count(config, "sliding_window", 4096)
    raise InputError(
        "use_sliding_window, max_window_layers and layer_types: shardwise does a sliding window on all layers or on "
        "none, not on some of them"
    )


def _rope(config: dict[str, Any], default: float) -> tuple[float, dict[str, Any] | None]:
    """rope_theta and the Model's rope_scaling, from the keys of transformers 4 (rope_theta, rope_scaling) or 5
    (rope_parameters)."""
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    if old and new and old != new:
        raise InputError("rope_scaling and rope_parameters are both given, and differ")
    given = old or new or {}
    if not isinstance(given, dict):
        raise InputError(f"rope_scaling: a mapping is expected (it was {given!r})")
    given = {key: value for key, value in given.items() if value is not None}
    theta, top = given.pop("rope_theta", None), config.get("rope_theta")
    if theta is not None and top is not None and theta != top:
        raise InputError(f"rope_theta is {top} and, in rope_parameters, {theta}")
    theta = next((value for value in (theta, top) if value is not None), default)
    if given.pop("partial_rotary_factor", 1) != 1:
        raise InputError("partial_rotary_factor other than 1 is not something that shardwise computes")
    legacy = given.pop("type", None)
    kind = given.pop("rope_type", legacy or "default")
    if kind not in {*ROPE_SCALINGS, "default"} or legacy not in (kind, None):
        raise InputError(unknown("rope_type", str(legacy or kind), [*ROPE_SCALINGS, "default"]))
    if kind == "default":
        if given:
            raise InputError(f"rope_type is default, but {', '.join(map(repr, given))} is given")
        return theta, None
    return theta, {"kind": kind, **_scaling(kind, given, config)}


def _scaling(kind: str, given: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The fields of one kind of scaling, with what transformers puts for those that are absent."""
    if kind in ("yarn", "longrope", "llama3"):
        sequence = _count(config, "max_position_embeddings")
        original = _count(config, "original_max_position_embeddings", 0) or _count(
            given, "original_max_position_embeddings", sequence
        )
        given = given | {"original_max_position_embeddings": original}
        if kind != "llama3":
            given.setdefault("factor", sequence / original)
    if kind == "yarn":
        given = _yarn(given, scores=config.get("model_type") == "deepseek_v3")
    accepted = {key for key, ours in ROPE_KEYS.items() if ours in ROPE_SCALINGS[kind].model_fields}
    for key in given:
        if key not in accepted:
            raise InputError(f"rope parameters of rope_type {kind}: {unknown('field', key, accepted)}")
    return {ROPE_KEYS[key]: value for key, value in given.items()}


def _yarn(given: dict[str, Any], *, scores: bool) -> dict[str, Any]:
    """DeepSeek's mscale and mscale_all_dim, where both are set, stand for an attention_factor; a beta of 0 for the
    default. scores: mscale_all_dim scales the attention scores, too, as only DeepSeek's own attention does."""
    given = {key: value for key, value in given.items() if value or not key.startswith("beta_")}
    over, under, factor = given.pop("mscale", 0), given.pop("mscale_all_dim", 0), given["factor"]
    if not all(isinstance(value, int | float) for value in (over, under, factor)) or factor <= 0:
        raise InputError(f"rope parameters: numbers are expected: factor {factor!r}, mscale {over!r} and {under!r}")
    if over and under:
        log = math.log(factor) if factor > 1 else 0.0
        given = {"attention_factor": (0.1 * over * log + 1.0) / (0.1 * under * log + 1.0), **given}
    return given | ({"mscale_all_dim": under} if scores and under else {})


def _count(mapping: dict[str, Any], key: str, default: int | None = None) -> int:
    """A whole number. Raises InputError naming the key."""
    value = mapping.get(key)
    try:
        return parse_count(default if value is None else value)
    except ValueError as error:
        raise InputError(f"{key}: {error} (it was {value!r})") from None


def _differences(name: str, family: Family, model: Model) -> list[str]:
    """What keeps a Model from being of this family."""
    paths = {path for fields in (*family.fields.values(), *family.special.values()) for path in fields}
    said = {"name", "kv_heads", "head_dim", "rope_theta", "rope_scaling", "sliding_window", *_TRAINING_ONLY} | paths
    parts = {path.partition(".")[0] for path in paths if "." in path}
    lines = [f"{part} is null" for part in sorted(parts) if getattr(model, part) is None]
    needed = {field: info.default for field, info in Model.model_fields.items() if field not in said | parts}
    for part in parts:
        for field, info in type(getattr(model, part)).model_fields.items() if getattr(model, part) else ():
            needed |= {path: info.default} if (path := f"{part}.{field}") not in said else {}
    needed |= {
        path: value for path, value in family.fixed.items() if getattr(model, path.partition(".")[0]) is not None
    }
    lines += [
        f"{path} is {json.dumps(_value(model, path), default=str)}, not {json.dumps(value)}"
        for path, value in needed.items()
        if _value(model, path) != value
    ]
    for fields in family.fields.values():
        if len({_value(model, field) for field in fields}) > 1:
            lines.append(f"{' and '.join(fields)} are not equal")
    experts = model.experts
    if name == "deepseek_v3" and experts and (not experts.shared_ffn or experts.shared_ffn % experts.ffn):
        lines.append("experts.shared_ffn is not that of one or more shared experts of size experts.ffn")
    if name == "gpt2" and (model.kv_heads, model.head_dim * model.heads) != (model.heads, model.hidden):
        lines.append("kv_heads or head_dim is not that of heads and hidden")
    if name == "llama" and model.hidden % model.heads:
        lines.append(f"hidden {model.hidden} is not a multiple of heads {model.heads}")
    return lines


def _value(model: Model, path: str) -> Any:
    """Model's `layers`, or `count` of its `experts` by the path `experts.count`; None where it has no such part."""
    value: Any = model
    for name in path.split("."):
        value = getattr(value, name, None)
    return value
