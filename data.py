"""Data of the trainer: files and hub datasets -> tokens -> rows of fixed size -> batches.

Documents (plain texts, or with --task sft conversations) are tokenised once into a cache file. Rows
are cut from it in one of three ways, and every row has --seq_len inputs, whatever it holds:

    concat    documents end to end, cut every seq_len tokens; a token attends to all before it in
              the row, across documents
    isolate   whole documents side by side, padded; attention and positions start anew at each
    none      one document a row, padded

Tokens on their way to a row, in memory and in the cache: an id is trained on; ``IGNORE_INDEX - id``
(-100 and below) is the same token as context only.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
import logging
import os
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from checkpoint import UsageError, nearest

IGNORE_INDEX = -100  # a label with this value is not trained on (torch's and transformers' value)
BYTE_EOS = 256  # presets read bytes: 0..255, then EOS
SUFFIXES = (".txt", ".jsonl", ".parquet", ".npy")
ROLES = ("system", "user", "assistant", "tool")
PACK_WINDOW = 4096  # documents that are packed together: rows stay near file order, and fill well
COUNTS = ("documents", "empty", "hidden reasoning")  # in this order in the cache file

Batch = tuple[torch.Tensor, ...]  # arguments of the model's forward, see make_batch
log = logging.getLogger("qwen3-trn")


def check_data_flags(cfg: Any, bytes_only: bool) -> list[str]:
    """Problems of the data flags beside each other. ``bytes_only``: the model is a preset."""
    suffix, sft = Path(cfg.dataset).suffix, cfg.task == "sft"
    plain = cfg.dataset == "demo" or suffix in (".txt", ".npy")
    local = cfg.dataset == "demo" or os.path.isfile(cfg.dataset)
    rules = [
        (sft and bytes_only, f"--task sft: --model {cfg.model} is a preset and has no chat template; "
         "use a model folder or hub id, with --random_init to start from random weights"),
        (sft and plain, f"--task sft: --dataset {cfg.dataset} holds no conversations; "
         "use .jsonl, .parquet or a hub dataset with a column of messages"),
        (sft and cfg.packing == "concat", "--packing concat: --task sft keeps conversations apart; use none or isolate"),
        (cfg.packing != "concat" and suffix == ".npy", f"--packing {cfg.packing}: --dataset {cfg.dataset} does not say "
         "where documents end; use --packing concat, or .jsonl or .parquet"),
        (cfg.inspect < 0, f"--inspect {cfg.inspect}: must be 0 (off) or above"),
        (cfg.streaming and local, f"--streaming: does nothing for --dataset {cfg.dataset}, which is read from disk"),
        (cfg.dataset_config and local, f"--dataset_config: does nothing for --dataset {cfg.dataset}, which is no hub dataset"),
    ]  # fmt: skip
    return [message for broken, message in rules if broken]


# ---- Tokens -------------------------------------------------------------------------------------
class Encoder:
    """Texts and conversations to token ids and back: a model's tokenizer, or bytes for presets."""

    def __init__(self, model: str, folder: Callable[[], Path] | None) -> None:
        """``folder`` finds the tokenizer's files when they are first needed; None: bytes."""
        self.model, self.folder = model, folder

    @functools.cached_property
    def tokenizer(self) -> Any:
        folder = self.folder()
        try:
            found = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            found.backend_tokenizer.to_str()  # of the tokenizers library, as digest needs it
            return found
        except Exception as e:  # transformers raises many types here
            raise UsageError(f"--model {self.model}: no usable tokenizer: {one_line(e)}") from e

    @functools.cached_property
    def chat(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.model)

    @property
    def eos(self) -> int:
        eos = self.tokenizer.eos_token_id if self.folder else BYTE_EOS
        if eos is None:
            raise UsageError(
                f"--model {self.model}: its tokenizer has no EOS token to end documents"
            )
        return eos

    @property
    def digest(self) -> str:
        """What the token ids depend on, for the name of the cache."""
        if self.folder is None:
            return "bytes"
        state = [self.tokenizer.backend_tokenizer.to_str(), self.tokenizer.chat_template, self.eos]
        return hashlib.sha256(json.dumps(state).encode()).hexdigest()

    def encode(self, texts: list[str]) -> list[list[int]]:
        utf8 = [
            text.encode("utf-8", errors="replace") for text in texts
        ]  # JSON may hold surrogates
        if self.folder is None:
            return [list(text) for text in utf8]
        texts = [text.decode() for text in utf8]
        # verbose: transformers would warn of texts beyond the model's length, which are cut later
        return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        if self.folder is not None:
            return self.tokenizer.decode(ids)
        parts = (bytes([i]) if i < BYTE_EOS else b"<eos>" for i in ids)
        return b"".join(parts).decode("utf-8", errors="replace")


class ChatTemplate:
    """Finds the assistant's part of a conversation that a model's chat template has rendered.

    Templates rewrite earlier turns (Qwen3 drops their thinking), so the beginning of a conversation
    need not render to the beginning of the whole. Therefore only the whole is rendered. In it a turn
    of the assistant lies between the template's own header and its end-of-turn token, both learnt
    from a probe; no message may contain them, and there must be as many turns as messages.
    """

    def __init__(self, tokenizer: Any, model: str) -> None:
        self.tokenizer, where, answer = tokenizer, f"--model {model}", "ANSWER"
        if not tokenizer.chat_template:
            raise UsageError(f"{where}: its tokenizer has no chat template, which --task sft needs")
        question = [{"role": "user", "content": "Q"}]
        asked = self.render(question, where)
        prompt = self.render(question, where, add_generation_prompt=True)
        whole = self.render([*question, {"role": "assistant", "content": answer}, *question], where)
        before, _, after = whole.removeprefix(asked).partition(answer)
        self.prompt = prompt.removeprefix(asked)  # what generation starts from
        # A turn without thinking may open with less than that (Qwen3-Thinking's prompt opens <think>).
        heads = (self.prompt[:n] for n in range(len(self.prompt), -1, -1))
        self.header = next(head for head in heads if before.startswith(head))
        first = self.ids(after)[:1]
        self.end = tokenizer.convert_ids_to_tokens(first)[0] if first else ""
        for holds, rule in [
            (self.header and prompt != self.prompt, "mark where the assistant's turns begin"),
            (self.end in tokenizer.get_added_vocab() and after.startswith(self.end),
             "close the assistant's turns with a special token"),
            (self.ids("aa") == self.ids(self.end + "aa")[1:], "fit a tokenizer that adds to a text's start"),
        ]:  # fmt: skip
            if not holds:
                raise UsageError(
                    f"{where}: --task sft cannot use its chat template: it does not {rule}"
                )

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def render(self, messages: list[Any], where: str, **kwargs: Any) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
        except Exception as e:  # whatever the template's expressions raise, and its own errors
            raise UsageError(f"{where}: the chat template refuses it: {one_line(e)}") from e

    def split(self, messages: list[Any], tools: Any, where: str, counts: Counter) -> list[str]:
        """The rendered conversation in pieces: context, answer, context, answer, ...

        An answer includes the end-of-turn token. What follows the last one is left out. The pieces
        are tokenised apart, as prompt and answer are in generation, so that no token is in both.
        Raises UsageError where they cannot be told apart exactly.
        """
        for i, message in enumerate(messages):
            marks = [self.header] + [self.end] * (message["role"] == "assistant")
            words = json.dumps(message, ensure_ascii=False, default=str)
            for mark in marks:
                if json.dumps(mark, ensure_ascii=False)[1:-1] in words:
                    own = f"contains the chat template's own {mark!r}"
                    raise UsageError(f"{where}, message {i}: {own}")
        text, pieces, at = self.render(messages, where, tools=tools), [], 0
        while (found := text.find(self.header, at)) >= 0:
            given = self.prompt if text.startswith(self.prompt, found) else self.header
            start = found + len(given)
            end = text.find(self.end, start) + len(self.end)
            if end < start:
                raise UsageError(f"{where}: the chat template does not close an assistant's turn")
            pieces += [text[at:start], text[start:end]]
            at = end
        answers = [m for m in messages if m["role"] == "assistant"]
        if len(pieces) != 2 * len(answers):
            found = f"{len(pieces) // 2} turns of the assistant for {len(answers)} messages"
            raise UsageError(f"{where}: the chat template renders {found}")
        for message, piece in zip(answers, pieces[1::2], strict=True):
            before, _, words = message["content"].rpartition("</think>")
            thoughts = message.get("reasoning_content") or before.partition("<think>")[2]
            if words.strip() not in piece:
                raise UsageError(f"{where}: the chat template does not show {words.strip()!r:.60}")
            counts["hidden reasoning"] += thoughts.strip() not in piece
        return pieces


def one_line(e: Exception) -> str:
    """An error of another library in one line of bounded length, with its type."""
    return f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"


# ---- Documents ----------------------------------------------------------------------------------
def file_rows(path: Path, column: str) -> Iterator[tuple[Any, str]]:
    """(row, where it stands) of a .txt file (one row) or a .jsonl file (a line each).

    Raises UsageError with file and line, which datasets' error for bad JSON lines does not give.
    """
    whole = path.suffix == ".txt"
    with path.open("rb") as f:
        for number, raw in enumerate([f.read()] if whole else f, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if whole:
                    yield {column: line}, str(path)
                elif line.strip():
                    yield json.loads(line), f"{path}, line {number}"
            except UnicodeDecodeError as e:
                bad = f"{e.reason}, byte {e.object[e.start]:#x}"
                number += raw[: e.start].count(b"\n")
                raise UsageError(f"{path}, line {number}: not UTF-8 ({bad})") from e
            except (ValueError, RecursionError) as e:
                raise UsageError(f"{path}, line {number}: not valid JSON: {e}") from e


def arrow_rows(cfg: Any) -> Iterator[tuple[Any, str]]:
    """Rows of a hub dataset, of a local folder in the hub's layout, or of a .parquet file."""
    from datasets import load_dataset

    source = [cfg.dataset, cfg.dataset_config, cfg.split, cfg.streaming]
    if parquet := cfg.dataset.endswith(".parquet"):
        source = ["parquet", None, "train", True]  # as a stream: it would be copied to a cache else
    files = {"data_files": cfg.dataset} if parquet else {}
    try:
        rows = load_dataset(*source[:2], split=source[2], streaming=source[3], **files)
        if cfg.streaming and not cfg.disable_shuffle:
            rows = rows.shuffle(seed=cfg.seed)
        for i, row in enumerate(rows):
            yield {k: without_nulls(v) for k, v in row.items()}, f"{cfg.dataset}, row {i}"
    except Exception as e:  # the hub client raises network, HTTP, and dataset errors of many types
        gated = "gated" in str(e) or "authenticated" in str(e)
        fix = "; ask for access on its page, then log in with `hf auth login`" if gated else ""
        raise UsageError(f"--dataset {cfg.dataset}: {one_line(e)}{fix}") from e


def without_nulls(value: Any) -> Any:
    """Arrow gives every object of a column the keys of all of them, with null for those it lacks."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def raw_rows(cfg: Any) -> Iterator[tuple[Any, str]]:
    """(row, where it stands) of --dataset, in file order. demo is Python's own source files: real
    text on every machine that runs this."""
    if cfg.dataset == "demo":
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            yield {cfg.text_column: path.read_text(encoding="utf-8", errors="replace")}, str(path)
    elif os.path.isfile(cfg.dataset) and not cfg.dataset.endswith(".parquet"):
        try:
            yield from file_rows(Path(cfg.dataset), cfg.text_column)
        except OSError as e:
            raise UsageError(f"--dataset {cfg.dataset}: cannot be read: {e.strerror or e}") from e
    else:
        yield from arrow_rows(cfg)


def cell(row: Any, column: str, where: str, kind: type = object) -> Any:
    """row[column], which must be a ``kind``; UsageError with the columns there are."""
    if not isinstance(row, dict) or column not in row:
        names = list(row) if isinstance(row, dict) else []
        fix = f"set --text_column.{nearest(column, names)}"
        raise UsageError(f"{where}: no column {column!r}; columns: {names}; {fix}")
    if not isinstance(value := row[column], kind):
        rule = f"must be {'text' if kind is str else 'a list'}, is {type(value).__name__}"
        raise UsageError(f"{where}: column {column!r} {rule}")
    return value


def chat_pieces(row: Any, cfg: Any, where: str, chat: ChatTemplate, counts: Counter) -> list[str]:
    """A conversation as [context, answer, context, answer, ...]; [] if the assistant says nothing.

    Expects messages as transformers' chat templates do: objects with role and content; assistant
    messages may have reasoning_content and tool_calls. A column ``tools`` holds the tools' schemas.
    """
    messages = cell(row, cfg.text_column, where, list)
    messages = [checked_message(m, f"{where}, message {i}") for i, m in enumerate(messages)]
    said = ("content", "reasoning_content", "tool_calls")
    if not any(m["role"] == "assistant" and any(map(m.get, said)) for m in messages):
        return []
    tools = row.get("tools") or []
    if isinstance(tools, str):  # many datasets keep JSON inside a text column
        try:
            tools = json.loads(tools) or []
        except ValueError as e:
            raise UsageError(f"{where}: column 'tools' is not valid JSON: {e}") from e
    return chat.split(messages, cell({"tools": tools}, "tools", where, list) or None, where, counts)


def checked_message(message: Any, where: str) -> dict[str, Any]:
    """The message without nulls; content is text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        hint = "; rename from/value" if isinstance(message, dict) and "from" in message else ""
        raise UsageError(f"{where}: must be an object with role and content{hint}")
    message = {k: v for k, v in message.items() if v is not None}
    role = message["role"]
    if role not in ROLES:  # templates pass over a role that they do not know
        rule = f"must be one of {', '.join(ROLES)}.{nearest(role, ROLES)}"
        raise UsageError(f"{where}: role {role!r} {rule}")
    content = message.get("content", "" if role == "assistant" else None)  # beside tool calls
    if not isinstance(content, str):
        raise UsageError(f"{where}: content must be text, is {type(content).__name__}")
    return message | {"content": content}


def documents(cfg: Any, encoder: Encoder, vocab_size: int, counts: Counter) -> Iterator[np.ndarray]:
    """Tokens [n] int64 of one document after the other; empty ones are counted and left out.

    A text ends with EOS, a conversation with its last end-of-turn token.
    """
    eos = np.array([encoder.eos] if cfg.task == "pretrain" else [], dtype=np.int64)

    def encoded(batch: list[tuple[list[str], str]]) -> Iterator[np.ndarray]:
        flat = iter(encoder.encode([piece for pieces, _ in batch for piece in pieces]))
        for pieces, where in batch:
            parts = [np.asarray(next(flat), dtype=np.int64) for _ in pieces]
            check_ids(np.concatenate((*parts, eos)), vocab_size, where)
            parts[::2] = [IGNORE_INDEX - ids for ids in parts[::2]]
            yield np.concatenate((*parts, eos))

    batch = []
    for row, where in raw_rows(cfg):
        if cfg.task == "pretrain":
            text = cell(row, cfg.text_column, where, str)
            pieces = ["", text] if text else []
        else:
            pieces = chat_pieces(row, cfg, where, encoder.chat, counts)
        counts["documents" if pieces else "empty"] += 1
        if pieces:
            batch.append((pieces, where))
        if len(batch) == 256:
            yield from encoded(batch)
            batch = []
    if batch:
        yield from encoded(batch)


def check_ids(ids: np.ndarray, vocab_size: int, where: str) -> None:
    """Every id must have a row in the embedding; IGNORE_INDEX marks a label that is not trained."""
    bad = np.flatnonzero(((ids < 0) & (ids != IGNORE_INDEX)) | (ids >= vocab_size))
    if bad.size:
        what = f"token id {ids.flat[bad[0]]} at position {bad[0]}"
        rule = f"is outside 0 to {vocab_size - 1}, the model's vocabulary; wrong tokenizer?"
        raise UsageError(f"--dataset {where}: {what} {rule}")


# ---- Token cache --------------------------------------------------------------------------------
def cached_tokens(cfg: Any, encoder: Encoder, vocab_size: int) -> Path:
    """The dataset as one token file; made once, found again by the content of its name."""
    if cfg.dataset == "demo":
        source = [sys.version, sysconfig.get_path("stdlib")]
    elif os.path.exists(cfg.dataset):
        path = Path(cfg.dataset).resolve()
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        source = [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files]
        source += [cfg.dataset_config, cfg.split]
    else:
        source = [cfg.dataset, cfg.dataset_config, cfg.split]
    key = json.dumps(["v2", source, cfg.task, cfg.text_column, vocab_size, encoder.digest])
    folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "qwen3-trn"
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.bin"
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        f = tempfile.NamedTemporaryFile(dir=folder, delete=False)  # noqa: SIM115 - closed below
        try:
            with f:
                write_tokens(cfg, encoder, vocab_size, f)
            os.replace(f.name, path)
        finally:
            Path(f.name).unlink(missing_ok=True)  # an error or Ctrl-C leaves nothing behind
    except OSError as e:
        said = f"{e.strerror or e}; set XDG_CACHE_HOME to another folder"
        raise UsageError(f"{folder}: the token cache cannot be written: {said}") from e
    return path


def write_tokens(cfg: Any, encoder: Encoder, vocab_size: int, f: Any) -> None:
    """int32 tokens of all documents; then int64: end of each document, COUNTS, number of documents."""
    from tqdm import tqdm

    counts, ends, total = Counter(), [], 0
    how = {"unit": " tokens", "unit_scale": True, "mininterval": 1, "disable": None}
    with tqdm(desc=f"tokenising {cfg.dataset}", **how) as bar:
        for tokens in documents(cfg, encoder, vocab_size, counts):
            f.write(tokens.astype(np.int32).tobytes())
            total += len(tokens)
            ends.append(total)
            bar.update(len(tokens))
    f.write(np.array([*ends, *(counts[k] for k in COUNTS), len(ends)], dtype=np.int64).tobytes())
    log.info(f"tokenised {cfg.dataset}: {total:,} tokens in {len(ends):,} documents")


def read_tokens(path: Path) -> tuple[np.ndarray, np.ndarray, Counter]:
    """(tokens [n] int32, end of each document [documents] int64), both memory-mapped, and COUNTS."""
    size = path.stat().st_size
    n = int(np.fromfile(path, np.int64, offset=size - 8)[0])
    tail = size - 8 * (n + len(COUNTS) + 1)
    ends = np.memmap(path, np.int64, mode="r", offset=tail, shape=(n + len(COUNTS),))
    tokens = np.memmap(path, np.int32, mode="r", shape=(tail // 4,))
    return tokens, ends[:n], Counter(dict(zip(COUNTS, ends[n:].tolist(), strict=True)))


def load_npy(path: Path, seq_len: int, vocab_size: int) -> np.ndarray:
    """A memory-mapped .npy: a 1-D token stream, or 2-D rows of seq_len + 1. Never unpickles."""
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as e:
        raise UsageError(f"--dataset {path}: cannot be read as .npy: {e}") from e
    if tokens.dtype.kind not in "iu" or tokens.ndim not in (1, 2):
        found = f"{tokens.ndim}-D {tokens.dtype}"
        raise UsageError(f"--dataset {path}: must be 1-D or 2-D integers, is {found}")
    if tokens.ndim == 2 and (width := tokens.shape[1]) != seq_len + 1:
        rule = f"must have --seq_len + 1 = {seq_len + 1}; use --seq_len {width - 1}"
        raise UsageError(f"--dataset {path}: rows have {width} tokens, {rule}")
    rows = 2**22 if tokens.ndim == 1 else max(1, 2**22 // tokens.shape[1])  # bounds host memory
    for start in range(0, len(tokens), rows):
        unit = "token" if tokens.ndim == 1 else "row"
        check_ids(tokens[start : start + rows].ravel(), vocab_size, f"{path}, from {unit} {start}")
    return tokens


# ---- Rows ---------------------------------------------------------------------------------------
def shifted(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [..., n + 1] -> input ids and labels [..., n]. Shifted here and nowhere else."""
    context = tokens <= IGNORE_INDEX
    ids = np.where(context, IGNORE_INDEX - tokens, tokens)
    return ids[..., :-1], np.where(context, IGNORE_INDEX, tokens)[..., 1:]


def document_row(pieces: list[np.ndarray], seq_len: int) -> np.ndarray:
    """Documents side by side -> [3, S] int64: input ids, labels, document starts (see make_batch).

    A document of n + 1 tokens takes n places: no label crosses from one to the next.
    """
    row = np.zeros((3, seq_len), dtype=np.int64)
    row[1:] = [[IGNORE_INDEX], [-1]]
    at = 0
    for tokens in pieces:
        ids, labels = shifted(tokens.astype(np.int64))
        row[0, at : at + len(ids)], row[1, at : at + len(ids)] = ids, labels
        row[2, at : at + len(ids)] = at
        at += len(ids)
    return row


def make_batch(rows: list[np.ndarray]) -> Batch:
    """Rows [S + 1] or [3, S] -> input_ids, labels [B, S] int64 on the host.

    From [3, S] a third tensor, document_starts [B, S]: where in its row each token's document
    begins, and -1 for padding. It says all that isolation needs: the position is the place less the
    start, and a token may see the places from its start to itself.
    """
    stack = np.stack(rows)
    if stack.ndim == 3:
        return tuple(torch.from_numpy(stack[:, i].copy()) for i in range(3))
    ids, labels = shifted(stack)
    return torch.from_numpy(ids.copy()), torch.from_numpy(labels.copy())


def pack(places: list[int], room: int) -> list[list[int]]:
    """Best fit, longest first: documents that take ``places`` (<= room) -> rows of their numbers."""
    rows: list[list[int]] = []
    left: list[tuple[int, int]] = []  # (places left, row), sorted; full rows are not listed
    for i in sorted(range(len(places)), key=lambda i: -places[i]):
        found = bisect.bisect_left(left, (places[i], -1))
        free, row = left.pop(found) if found < len(left) else (room, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        if free > places[i]:
            bisect.insort(left, (free - places[i], row))
    return sorted(sorted(row) for row in rows)


def report(cfg: Any, counts: Counter, rows: int) -> None:
    """What became of the documents, as a warning if some were left out."""
    kind = "conversations" if cfg.task == "sft" else "documents"
    problems = {
        "over-long": f"of them longer than --seq_len {cfg.seq_len} + 1 tokens, left out",
        "empty": f"empty {kind} left out",
        "hidden reasoning": "assistant messages whose thinking the chat template leaves out",
    }
    said = [f"{counts[k]:,} {text}" for k, text in problems.items() if counts[k]]
    made = f"{cfg.dataset}: {counts['documents']:,} {kind} make {rows:,} rows"
    log.log(logging.WARNING if said else logging.INFO, "; ".join([made, *said]))


class FileRows:
    """Rows of seq_len + 1 tokens with random access; neighbours share one token, so that each is
    predicted once. The last ``held_out`` rows are for validation."""

    def __init__(self, cfg: Any, encoder: Encoder, vocab_size: int) -> None:
        self.cfg, self.seq_len, self.counts = cfg, cfg.seq_len, Counter()
        if cfg.dataset.endswith(".npy"):
            self.tokens = load_npy(Path(cfg.dataset), cfg.seq_len, vocab_size)
        else:
            path = cached_tokens(cfg, encoder, vocab_size)
            self.tokens, self.ends, self.counts = read_tokens(path)
        self.num_rows = self.arrange()
        if not cfg.dataset.endswith(".npy"):
            report(cfg, self.counts, self.num_rows)

    def arrange(self) -> int:
        """The number of rows."""
        if self.tokens.ndim == 2:
            return len(self.tokens)
        return max(0, len(self.tokens) - 1) // self.seq_len

    def hold_out(self, held_out: int, global_batch: int) -> None:
        needed = held_out + global_batch
        if self.num_rows < needed:
            found = (
                f"{self.tokens.size:,} tokens make {self.num_rows} rows of --seq_len {self.seq_len}"
            )
            exact = f", {needed * self.seq_len + 1:,} tokens" * (self.cfg.packing == "concat")
            fix = "use more data, or a smaller --seq_len, --global_batch_size or --local_batch_size"
            if lost := self.counts["over-long"]:
                fix = f"{lost} conversations are too long: use a larger --seq_len"
            raise UsageError(
                f"--dataset {self.cfg.dataset}: {found}, but one step and validation need {needed} "
                f"rows{exact}; {fix}"
            )
        self.held_out, self.num_train = held_out, self.num_rows - held_out

    def row(self, i: int) -> np.ndarray:
        if self.tokens.ndim == 2:
            return self.tokens[i].astype(np.int64)
        return self.tokens[i * self.seq_len : (i + 1) * self.seq_len + 1].astype(np.int64)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - one dataset a process
    def order(self, epoch: int) -> np.ndarray:
        if self.cfg.disable_shuffle:
            return np.arange(self.num_train)
        return np.random.default_rng([self.cfg.seed, epoch]).permutation(self.num_train)

    def train(self, position: int) -> np.ndarray:
        """The row at a position of the endless global order, which knows nothing of ranks."""
        epoch, i = divmod(position, self.num_train)
        return self.row(int(self.order(epoch)[i]))

    def held_out_row(self, i: int) -> np.ndarray:
        return self.row(self.num_train + i)


class DocumentRows(FileRows):
    """Rows of whole documents, [3, S]. Texts longer than a row are cut, conversations left out."""

    def arrange(self) -> int:
        S, starts = self.seq_len, np.concatenate(([0], self.ends[:-1]))[: len(self.ends)]
        places = self.ends - starts - 1  # a document's last token is only a label
        if self.cfg.task == "sft":
            self.counts["over-long"] = int((places > S).sum())
            places = np.where(places > S, 0, places)
        num_pieces = -(-places // S)
        nth = np.arange(num_pieces.sum()) - np.repeat(num_pieces.cumsum() - num_pieces, num_pieces)
        self.first = np.repeat(starts, num_pieces) + nth * S
        self.places = np.minimum(np.repeat(places, num_pieces) - nth * S, S)
        if self.cfg.packing == "none":
            self.contents = np.arange(len(self.first))
            self.row_ends = self.contents + 1
        else:
            rows = [
                [start + i for i in row]
                for start in range(0, len(self.places), PACK_WINDOW)
                for row in pack(self.places[start : start + PACK_WINDOW].tolist(), S)
            ]
            self.contents = np.fromiter(itertools.chain.from_iterable(rows), np.int64)
            self.row_ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        return len(self.row_ends)

    def row(self, i: int) -> np.ndarray:
        pieces = self.contents[self.row_ends[i - 1] if i else 0 : self.row_ends[i]]
        tokens = [self.tokens[self.first[p] : self.first[p] + self.places[p] + 1] for p in pieces]
        return document_row(tokens, self.seq_len)


class StreamRows:
    """Rows of a streamed hub dataset, in stream order. Every rank reads and packs the whole stream and
    keeps its own rows: dear in tokenising, but the order is the same for any number of ranks."""

    def __init__(self, cfg: Any, encoder: Encoder, vocab_size: int) -> None:
        self.cfg, self.num_rows, self.made, self.next = cfg, None, 0, 0
        self.source = functools.partial(documents, cfg, encoder, vocab_size)
        self.rows = self.concat() if cfg.packing == "concat" else self.side_by_side()

    def endless(self) -> Iterator[np.ndarray | None]:
        """The documents again and again, with None after the last."""
        while True:
            made, self.counts = self.made, Counter()
            yield from self.source(self.counts)
            yield None
            report(self.cfg, self.counts, self.made - made)
            if self.made == made:
                raise UsageError(f"--dataset {self.cfg.dataset}: the stream makes not one row")

    def concat(self) -> Iterator[np.ndarray]:
        buffer = np.empty(0, np.int64)
        for tokens in self.endless():
            buffer = buffer if tokens is None else np.concatenate((buffer, tokens))
            while len(buffer) > self.cfg.seq_len:
                self.made += 1
                yield buffer[: self.cfg.seq_len + 1]
                buffer = buffer[self.cfg.seq_len :]

    def side_by_side(self) -> Iterator[np.ndarray]:
        S, window, size = self.cfg.seq_len, [], PACK_WINDOW if self.cfg.packing == "isolate" else 1
        for tokens in self.endless():
            if tokens is not None and self.cfg.task == "sft" and len(tokens) - 1 > S:
                self.counts["over-long"] += 1
                if self.counts["over-long"] == 1:
                    log.warning(f"leaving out conversations longer than --seq_len {S} + 1 tokens")
            elif tokens is not None:
                window += [tokens[at : at + S + 1] for at in range(0, len(tokens) - 1, S)]
            if tokens is None or len(window) >= size:
                for row in pack([len(t) - 1 for t in window], S):
                    self.made += 1
                    yield document_row([window[i] for i in row], S)
                window = []

    def hold_out(self, held_out: int, global_batch: int) -> None:
        self.kept = [next(self.rows) for _ in range(held_out)]

    def train(self, position: int) -> np.ndarray:
        while self.next < position:  # rows of other ranks, or of steps before a resume
            next(self.rows)
            self.next += 1
        self.next += 1
        return next(self.rows)

    def held_out_row(self, i: int) -> np.ndarray:
        return self.kept[i]


def open_rows(cfg: Any, encoder: Encoder, vocab_size: int) -> FileRows | StreamRows:
    """The dataset as rows; tokenises it if no earlier run has. Raises UsageError."""
    path = Path(cfg.dataset)
    local = cfg.dataset == "demo" or os.path.isfile(path)
    if local and cfg.dataset != "demo" and path.suffix not in SUFFIXES:
        raise UsageError(f"--dataset {path}: must end in {', '.join(SUFFIXES)}")
    named_like_a_file = path.suffix in SUFFIXES or cfg.dataset.startswith(("/", ".", "~"))
    if named_like_a_file and not local and not os.path.isdir(path):
        there = os.listdir(path.parent) if os.path.isdir(path.parent) else []
        raise UsageError(f"--dataset {path}: no such file.{nearest(path.name, there)}")
    if cfg.streaming and not local:
        return StreamRows(cfg, encoder, vocab_size)
    return (FileRows if cfg.packing == "concat" else DocumentRows)(cfg, encoder, vocab_size)


# ---- Loader -------------------------------------------------------------------------------------
class Loader:
    """This rank's micro-batches. ``position``, the number of rows the whole job has consumed, is the
    only state. The next step's rows are read while the current one computes."""

    def __init__(self, rows: Any, cfg: Any, dp_rank: int, dp_size: int) -> None:
        self.rows, self.local = rows, cfg.local_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.micro = self.local * dp_size
        self.global_batch = self.micro if cfg.global_batch_size == -1 else cfg.global_batch_size
        self.held_out = cfg.eval_steps * self.global_batch if cfg.eval_every else 0
        rows.hold_out(self.held_out, self.global_batch)
        self.position = 0
        self.pool = ThreadPoolExecutor(1)
        self.ahead: Any = None

    def own(self, first: int, row: Callable[[int], np.ndarray]) -> list[Batch]:
        """This rank's share of the global batch that starts at ``first``: one batch a micro-step."""
        starts = range(first + self.dp_rank * self.local, first + self.global_batch, self.micro)
        return [make_batch([row(i) for i in range(start, start + self.local)]) for start in starts]

    def __next__(self) -> list[Batch]:
        ahead = self.ahead or self.pool.submit(self.own, self.position, self.rows.train)
        batches = ahead.result()
        self.position += self.global_batch
        self.ahead = self.pool.submit(self.own, self.position, self.rows.train)
        return batches

    def validation(self) -> Iterator[Batch]:
        for first in range(0, self.held_out, self.global_batch):
            yield from self.own(first, self.rows.held_out_row)


def inspect(loader: Loader, encoder: Encoder, n: int) -> Iterator[str]:
    """The first ``n`` training rows as text, the trained tokens between marks."""
    for i in range(n):
        ids, labels, *starts = (t[0] for t in make_batch([loader.rows.train(i)]))
        starts = starts[0] if starts else torch.zeros_like(ids)
        trained, padding = int((labels != IGNORE_INDEX).sum()), int((starts < 0).sum())
        yield f"--- row {i}: {len(ids)} tokens, {padding} of them padding; {trained} labels"
        for start in starts[starts >= 0].unique():
            place = starts == start
            # A token is trained on as the label of the one before it; the last is a label only.
            tokens = [*ids[place].tolist(), *labels[place][-1:].tolist()]
            marks = [False, *(labels[place] != IGNORE_INDEX).tolist()]
            text = ""
            for marked, run in itertools.groupby(zip(marks, tokens, strict=True), lambda x: x[0]):
                words = encoder.decode([t for _, t in run if t != IGNORE_INDEX])
                text += f"\u27e6{words}\u27e7" if marked else words
            yield text
