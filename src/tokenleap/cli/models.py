"""`tokenleap models`: list, fetch, check and delete the models in the cache."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenleap.cli.console import display, errors, plain, remark, show, show_json, table_of, tell
from tokenleap.cli.options import JsonOption, resolve
from tokenleap.cli.root import DefaultGroup, UsageError, examples
from tokenleap.errors import TokenleapError

if TYPE_CHECKING:
    from tokenleap.models import Alias, CachedModel

EXAMPLES = examples(
    "tokenleap models",
    "tokenleap models fetch smollm2-135m",
    "tokenleap models path smollm2-135m --gguf",
    "tokenleap models convert old-model --output new-model",
    "tokenleap models check",
    "tokenleap models remove smollm2-135m --yes",
)

PS_EXAMPLES = examples(
    "tokenleap ps",
    "tokenleap ps --url http://10.0.0.7:8000 --api-key SECRET",
)

ModelName = Annotated[str, typer.Argument(help="What --model takes.", metavar="NAME")]

_ANSWERS_WITHIN = 10.0  # seconds

app = typer.Typer(cls=DefaultGroup, rich_markup_mode="rich", epilog=EXAMPLES)


@app.callback()
def models() -> None:
    """List, fetch, check and remove models. Without a command, list them."""


@app.command("list")
def list_models(json_output: JsonOption = False) -> None:
    """List the short names, and the models and packed weights in the cache."""
    from tokenleap.models import aliases, cache_dir, cached, short_names
    from tokenleap.models.store import bytes_text

    folders = {model.name: model for model in cached()}
    known = aliases()
    rows = [_row(known.get(name), folders.get(name)) for name in sorted({*known, *folders})]
    if json_output:
        short = [asdict(each) for each in short_names().values()]
        show_json({"cache_dir": str(cache_dir()), "models": rows, "short_names": short})
        return
    packed = [row for row in rows if row["kind"] == "packed"]
    for row in rows:
        if row not in packed:
            _show(row)
    if packed:
        display().print(plain("\nPacked weights, which are used when their model is loaded:\n"))
    for row in packed:
        _show(row)
    display().print(
        plain("\nShort names of models on the Hugging Face Hub, with their download:\n")
    )
    table = [
        (
            each.name,
            each.model.rpartition("/")[0],
            each.quantization,
            each.licence,
            bytes_text(each.download_bytes),
        )
        for each in short_names().values()
    ]
    show(table_of(("name", "repository", "weights", "licence", "size"), table, left=4))
    tell(f"\nThe cache is {cache_dir()}.", "note")


@app.command()
def fetch(name: ModelName) -> None:
    """Fetch and convert a model now, so that its first use does not wait."""
    folder = _packed_gguf(name) or resolve(name)
    tell(f"{name} is ready in {folder}")


@app.command()
def path(
    name: ModelName,
    gguf: Annotated[
        bool,
        typer.Option("--gguf", help="The GGUF file of a short name instead, for other programs."),
    ] = False,
) -> None:
    """Print where a model is. It is fetched and converted first if needed."""
    if gguf:
        from tokenleap.models import aliases, gguf_of, short_names

        if name not in {*aliases(), *short_names()}:
            raise UsageError(f"--gguf: {name} is no alias or short name")
        found = gguf_of(name)
    else:
        found = resolve(name)
    print(found)


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="A folder, a .bin, .pt or .pth file, or ORG/NAME on the Hub.", metavar="MODEL"
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The new folder.")],
) -> None:
    """Convert pickle checkpoints to safetensors, in a sandboxed process.

    Configuration and tokenizer are copied. Pickles of more than tensors are
    refused.
    """
    from tokenleap.models.pickles import convert_pickles
    from tokenleap.models.resolver import hub_pickles, is_hub_id

    place = Path(source)
    if not place.exists() and is_hub_id(source):
        place = hub_pickles(source)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:  # so that SIGTERM leaves nothing behind
        forbidden = convert_pickles(place, output)
    finally:
        signal.signal(signal.SIGTERM, before)
    tell(f"{output} is ready")
    if not any(Path(output).glob("tokenizer*")):
        remark("it has no tokenizer: put the files of one into it, or give prompts as token ids")
    if len(forbidden) < 2:
        remark(
            "This system has no Landlock or seccomp for the process that read the pickles: its "
            f"limits were time and memory{' and files' if 'files' in forbidden else ''} only."
        )


@app.command()
def remove(
    name: Annotated[str, typer.Argument(help="A name from `tokenleap models`.", metavar="NAME")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a model from the cache."""
    from tokenleap import models as store
    from tokenleap.models.store import bytes_text

    found = _cached(name)
    size = bytes_text(found[name].size_bytes)
    if not (yes or _confirmed(f"Delete {name} ({size})?")):
        display().print("nothing deleted")
        return
    store.remove(name)
    tell(f"{name} is deleted, which frees {size}")


@app.command()
def check(
    name: Annotated[
        str | None, typer.Argument(help="A name from `tokenleap models`.", metavar="[NAME]")
    ] = None,
    *,
    json_output: JsonOption = False,
) -> None:
    """Compare the files of one model in the cache, or of all, with their checksums.

    Damaged models are made again when they are loaded. Exit status 1 if
    there is one.
    """
    from tokenleap import models as store

    found = {each: store.check(each) for each in _cached(name) if name in (None, each)}
    if json_output:
        show_json({"models": [{"name": each, "damaged": d} for each, d in found.items()]})
    else:
        for each, damaged in found.items():
            tell(f"{each} {_condition(damaged)}")
    if any(found.values()):
        raise typer.Exit(1)


def ps(
    url: Annotated[
        str, typer.Option(help="The server to ask.", metavar="URL")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option(help="Its API key.", metavar="KEY", envvar="TOKENLEAP_API_KEY"),
    ] = None,
    *,
    json_output: JsonOption = False,
) -> None:
    """Show what a server runs: the names that requests may use.

    One server is asked, the default one of `tokenleap serve` unless --url
    names another. Exit status 1 if none answers there.
    """
    url = url.rstrip("/").removesuffix("/v1")
    served = _served(url, api_key)
    if json_output:
        show_json({"url": url, "models": served})
        return
    for each in served:
        tell(f"{each['id']} at {url}")


def _served(url: str, api_key: str | None) -> list[dict[str, Any]]:
    """What `/v1/models` of a server lists."""
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    try:
        asked = Request(f"{url}/v1/models")
        if api_key is not None:
            asked.add_unredirected_header("Authorization", f"Bearer {api_key}")
        with urlopen(asked, timeout=_ANSWERS_WITHIN) as answer:
            found = json.load(answer)["data"]
            return [{**each, "id": str(each["id"])} for each in found]
    except HTTPError as error:
        advice = ": add --api-key" if error.code in (401, 403) else ""
        raise TokenleapError(
            f"the server at {url} refuses to list its models (status {error.code}){advice}"
        ) from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise TokenleapError(
            f"no server answers at {url} ({reason}): start `tokenleap serve`, or name another "
            "one with --url"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise TokenleapError(f"what answers at {url} is no server of OpenAI's API") from None


def _cached(name: str | None) -> dict[str, CachedModel]:
    """The models in the cache by name; refuses another name."""
    from tokenleap.models import cached

    found = {model.name: model for model in cached()}
    if name is not None and name not in found:
        held = ", ".join(found) or "nothing"
        raise UsageError(f"{name} is not in the cache, which holds {held}")
    return found


def _condition(damaged: list[str] | None) -> str:
    if damaged:
        return f"is damaged, and is made again when it is loaded: {', '.join(damaged)}"
    if damaged is None:
        return "has no checksums: an older version made it. Its files have the right sizes."
    return "is as it was made"


def _packed_gguf(name: str) -> Path | None:
    """The packed weights of a GGUF file, as `LLM` takes them by default; None if it does not."""
    from tokenleap.models.resolver import gguf_file

    if gguf_file(name) is None:
        return None
    from tokenleap.models.support import default_device, default_dtype
    from tokenleap.runtime.packed import open_packed

    device = default_device("auto")
    packed = open_packed(
        name, default_dtype("auto", device), device, quantization="auto", runtime="auto"
    )
    return None if packed is None else packed.folder


def _row(alias: Alias | None, model: CachedModel | None) -> dict[str, Any]:
    """One model as --json shows it; alias, cached model, or both."""
    return {
        "name": alias.name if alias else model.name if model else None,
        "alias": alias is not None,
        "cached": model is not None,
        "kind": model.kind if model else "model",
        "folder": str(model.folder) if model else None,
        "size_bytes": model.size_bytes if model else None,
        "download_bytes": alias.download_bytes if alias else None,
        "runs": model.runs if model else None,
        "source": model.source if model else alias.requirement if alias else None,
        "description": alias.description if alias else None,
        "licence": alias.licence if alias else None,
    }


def _show(row: dict[str, Any]) -> None:
    """A model in lines: names and paths are too long for a table."""
    from tokenleap.models.store import bytes_text

    size = bytes_text(row["size_bytes"] if row["cached"] else row["download_bytes"])
    state = size if row["cached"] else f"{size} to fetch"
    about = [f"from {row['source']}", *(row[name] for name in ("description", "runs") if row[name])]
    display().print(plain(row["name"], "head"), plain(state), sep="   ", soft_wrap=True)
    for line in about:
        tell(f"    {line}", "note")


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("this cannot be confirmed without a terminal: add --yes")
    errors().print(plain(f"{question} [y/N] "), end="")
    return sys.stdin.readline().strip().lower() in ("y", "yes")
