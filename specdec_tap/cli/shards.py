"""``specdec-tap shards``: list, summarise, show, verify and repair captured shards."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, ShardError, SpecdecTapError, StreamBusyError
from ._console import human_bytes, positive_int, print_table, progress_bar

if TYPE_CHECKING:
    from ..shards import Record, ShardStore

_EPILOG = """examples:
  specdec-tap shards ls shards/
  specdec-tap shards stats shards/ --json
  specdec-tap shards show shards/ host-0/000001/0
  specdec-tap shards verify shards/
  specdec-tap shards repair shards/
  specdec-tap shards import shards/ dump/ --from modelopt --target MODEL_DIR
"""

_FORMATS_HELP = "modelopt, modelopt-vllm, speculators, vllm-connector, specforge or eagle"
MAX_NAMED = 20
"""Records that a sentence for people names."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, summary: str, function: Any, example: str) -> argparse.ArgumentParser:
        sub = actions.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog="examples:\n" + "".join(f"  specdec-tap shards {line}\n" for line in example.split("\n")),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument(
            "path", metavar="SHARDS", help="shards folder, one stream's folder, or one shard file"
        )
        sub.set_defaults(action_function=function)
        return sub

    ls = action(
        "ls", "list shard files, or records", _ls, "ls shards/\nls shards/ --records --limit 20 --json"
    )
    ls.add_argument("--records", action="store_true", help="list records instead of files")
    ls.add_argument(
        "--limit", type=positive_int, metavar="N", help="with --records: at most N (default: all)"
    )
    _add_json(ls)

    stats = action(
        "stats",
        "sum up a folder: tokens, bytes, ratio, target",
        _stats,
        "stats shards/\nstats shards/ --json",
    )
    _add_json(stats)

    show = action(
        "show",
        "show one record: its text with spans coloured, its facts, where its states are",
        _show,
        "show shards/ host-0/000001/0\nshow shards/ 17 --json",
    )
    show.add_argument(
        "record", metavar="ID", help="record id such as host-0/000001/0, or its number in the folder"
    )
    show.add_argument("--tokens", action="store_true", help="print token ids instead of text")
    _add_json(show)

    verify = action(
        "verify",
        "prove that shards hold what they claim; exit code 1 if they do not",
        _verify,
        "verify shards/\nverify shards/ --target MODEL_DIR --reference MODEL_DIR --json",
    )
    verify.add_argument(
        "--target", type=Path, metavar="DIR", help="take the head from this model (default: SHARDS/target)"
    )
    verify.add_argument(
        "--reference",
        type=Path,
        metavar="DIR",
        help="compare a few records with a Hugging Face forward of this model",
    )
    verify.add_argument(
        "--reference-records",
        type=positive_int,
        default=4,
        metavar="N",
        help="how many (default: %(default)s)",
    )
    verify.add_argument(
        "--content-rows",
        type=int,
        default=8192,
        metavar="N",
        help="final states to put through the head; 0 skips that proof (default: %(default)s)",
    )
    _add_json(verify)

    repair = action(
        "repair",
        "seal journals whose writer died; rebuild damaged headers and indexes",
        _repair,
        "repair shards/\nrepair shards/host-0/000007.open",
    )
    _add_json(repair)

    forget = action(
        "forget",
        "erase single requests: their record and every block that no other request shares",
        _forget,
        "forget shards/ host-0/000001/0\nforget shards/ --request-id chatcmpl-123",
    )
    forget.add_argument("records", metavar="ID", nargs="*", help="record ids such as host-0/000001/0")
    forget.add_argument(
        "--request-id", action="append", default=[], metavar="R", help="records of this request; repeatable"
    )
    _add_json(forget)

    imported = action(
        "import",
        "read another tool's dump of hidden states into shards",
        _import,
        "import shards/ dump/ --from modelopt --target MODEL_DIR\n"
        "import shards/ hs/ --from speculators --target MODEL_DIR --layers 2,15,27",
    )
    imported.add_argument("source", type=Path, metavar="DUMP", help="the other tool's folder, or one file")
    imported.add_argument("--from", dest="format", required=True, metavar="FORMAT", help=_FORMATS_HELP)
    imported.add_argument(
        "--target", type=Path, required=True, metavar="DIR", help="Hugging Face directory of the model"
    )
    imported.add_argument(
        "--layers", type=_int_list, metavar="IDS", help="the tool's own layer ids (default: its default)"
    )
    imported.add_argument(
        "--convention",
        choices=("residual_in", "layer_output"),
        help="what its ids mean: the stream entering the layer, or leaving it (default: the format's)",
    )
    imported.add_argument(
        "--final-hidden",
        choices=("auto", "post_norm", "pre_norm"),
        default="auto",
        help="what its final states are; measured and checked where possible (default: auto). Shards are "
        "written post_norm",
    )
    imported.add_argument(
        "--reference",
        type=Path,
        metavar="DIR",
        help="compare a few records with a float32 forward of this Hugging Face directory before anything is "
        "added: the only proof of --layers",
    )
    imported.add_argument(
        "--stream",
        default="imported",
        help="stream to write; a number is added where there is one of that name (default: %(default)s)",
    )
    imported.add_argument(
        "--codec", choices=("lossless", "fp8", "int8"), default="lossless", help="(default: %(default)s)"
    )
    _add_json(imported)

    export = action(
        "export",
        "write shards in another tool's layout",
        _export,
        "export shards/ out/ --to specforge\nexport shards/ out/ --to speculators --no-stitch",
    )
    export.add_argument("out", type=Path, metavar="OUT", help="new folder")
    export.add_argument("--to", dest="format", required=True, metavar="FORMAT", help=_FORMATS_HELP)
    export.add_argument(
        "--no-stitch", action="store_true", help="one file a request, instead of one a conversation"
    )
    _add_json(export)

    upload = action(
        "upload",
        "copy sealed shards and target/ to a store (s3://, gs://, any fsspec URL)",
        _upload,
        "upload shards/ s3://bucket/shards\nupload shards/ s3://bucket/shards --follow --remove-local",
    )
    upload.add_argument("url", metavar="URL", help="where to")
    upload.add_argument("--follow", action="store_true", help="go on until interrupted, as shards are sealed")
    upload.add_argument(
        "--remove-local", action="store_true", help="remove a shard here once the store has it"
    )
    _add_json(upload)


def _int_list(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    return args.action_function(args)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _warn_skipped(store: ShardStore) -> None:
    for problem in store.skipped[:20]:
        print(f"skipped {problem}", file=sys.stderr)
    if len(store.skipped) > 20:
        print(f"skipped {len(store.skipped) - 20} more", file=sys.stderr)


# ---- ls, stats


def _open(args: argparse.Namespace, *, mixed: bool = False) -> ShardStore:
    from ..shards.reader import ALL_DIFFERENCES, open_shards

    return open_shards(args.path, ignore_differences=ALL_DIFFERENCES if mixed else ())


def _ls(args: argparse.Namespace) -> int:
    from ..shards.index import age, shard_row

    with _open(args, mixed=True) as store:
        if args.records:
            return _ls_records(args, store)
        rows = [shard_row(info) for info in store.shards]
        if args.json:
            skipped = [{"path": str(p.path), "message": p.message} for p in store.skipped]
            _print_json({"shards": rows, "skipped": skipped})
            return 0
        _warn_skipped(store)
        table = [
            (
                f"{row['stream']}/{row['shard']:06d}",
                row["state"],
                f"{row['num_records']:,}",
                f"{row['num_tokens']:,}",
                f"{row['num_blocks']:,}",
                human_bytes(row["file_bytes"]),
                f"{row['compression_ratio']:.2f}x",
                age(row["created_unix_s"]),
            )
            for row in rows
        ]
        total = f"{len(rows):,} shards, {human_bytes(sum(r['file_bytes'] for r in rows))}"
        print_table(
            total, table, headers=("shard", "state", "records", "tokens", "blocks", "size", "ratio", "age")
        )
    return 0


def _record_row(record: Record) -> dict[str, Any]:
    meta = record.meta
    return {
        "id": record.id,
        "request_id": meta.request_id,
        "num_tokens": meta.num_tokens,
        "response_tokens": meta.response_tokens,
        "gap_rows": record.num_rows - meta.covered_rows,
        "finish_reason": meta.finish_reason,
        "started_unix_s": meta.started_unix_s,
        "duration_s": meta.finished_unix_s - meta.started_unix_s,
        "lora": meta.lora,
        "flags": list(meta.flags),
    }


def _ls_records(args: argparse.Namespace, store: ShardStore) -> int:
    rows = []
    for record in store:
        if args.limit is not None and len(rows) >= args.limit:
            break
        rows.append(_record_row(record))
    if args.json:
        _print_json({"records": rows, "num_records": len(store)})
        return 0
    _warn_skipped(store)
    table = [
        (
            row["id"],
            _printable(row["request_id"])[:40],
            f"{row['num_tokens']:,}",
            f"{row['response_tokens']:,}",
            f"{row['gap_rows']:,}" if row["gap_rows"] else "",
            row["finish_reason"],
            f"{row['duration_s']:.2f} s",
        )
        for row in rows
    ]
    print_table(
        f"{len(rows):,} of {len(store):,} records",
        table,
        headers=("id", "request", "tokens", "response", "gap rows", "finish", "time"),
    )
    return 0


def _stats(args: argparse.Namespace) -> int:
    from ..shards.index import summarise

    with _open(args) as store:
        s = summarise(store)
    if args.json:
        _print_json(s)
        return 0
    target = s["target"]
    final = "none" if s["final_hidden"] == "none" else f"{s['final_hidden']}, at {s['final_scope']} positions"
    rows = [
        ("target", f"{target['name']} ({target['architecture']}, {target['num_hidden_layers']} layers, "
                   f"hidden {target['hidden_size']:,}, vocabulary {target['vocab_size']:,})"),
        ("aux layers", f"{', '.join(map(str, s['aux_layer_ids']))} ({s['layer_convention']})"),
        ("final states", final),
        ("stored as", f"{s['dtype']}, codec {', '.join(s['codecs'])}"),
        ("captured by", ", ".join(f"{k} {v}" for k, v in s["engine"].items())),
        ("shards", f"{s['num_shards']:,} in {s['num_streams']:,} streams, {s['num_open_shards']:,} open"),
        ("requests", f"{s['num_records']:,}"),
        ("tokens", f"{s['num_tokens']:,} ({s['response_tokens']:,} response)"),
        ("positions", f"{s['record_rows']:,} used, {s['num_rows']:,} stored "
                      f"({s['rows_shared_fraction']:.1%} shared), {s['gap_rows']:,} in gaps"),
        ("disk", f"{human_bytes(s['file_bytes'])}, {s['compression_ratio']:.2f}x smaller than raw"),
        ("bytes/token", f"{s['bytes_per_token']:,.0f} of {s['raw_bytes_per_token']:,.0f} in one raw file per "
                        f"request ({s['bytes_fraction']:.0%})"),
    ]  # fmt: skip
    print_table(s["root"], rows)
    for problem in s["skipped"][:20]:
        print(f"skipped {problem['path']}: {problem['message']}", file=sys.stderr)
    return 0


# ---- show


def _show(args: argparse.Namespace) -> int:
    with _open(args, mixed=True) as store:
        record = store[int(args.record)] if _is_number(args.record, len(store)) else store.find(args.record)
        meta = record.meta
        facts = _record_row(record)
        facts["sampling"] = dict(meta.sampling)
        facts["spans"] = [[s.start, s.stop, s.kind] for s in meta.spans]
        facts["gaps"] = [list(g) for g in record.gaps]
        facts["final"] = [list(f) for f in record.final_span]
        facts["pieces"] = [
            {
                "positions": [p.position, p.stop],
                "shard": f"{record.stream}/{p.block.shard:06d}",
                "block": p.block.block,
                "rows": [p.row_start, p.row_stop],
            }
            for p in meta.pieces
        ]
        if args.json:
            facts["token_ids"] = meta.token_ids.tolist()
            _print_json(facts)
            return 0
        decode = None if args.tokens else _decoder(store)
        _print_text(record, decode)
        rows = [
            ("request", _printable(meta.request_id)),
            (
                "tokens",
                f"{meta.num_tokens:,} ({meta.response_tokens:,} response), finished: {meta.finish_reason}",
            ),
            ("took", f"{facts['duration_s']:.2f} s"),
            (
                "sampling",
                ", ".join(f"{_printable(str(k))} {_printable(str(v))}" for k, v in meta.sampling.items()),
            ),
            ("gaps", ", ".join(f"[{a:,}, {b:,})" for a, b in record.gaps) or "none"),
            ("final states", ", ".join(f"[{a:,}, {b:,})" for a, b in record.final_span) or "none"),
        ]
        print_table(record.id, rows)
        table = [
            (
                f"[{p['positions'][0]:,}, {p['positions'][1]:,})",
                p["shard"],
                f"{p['block']:,}",
                f"[{p['rows'][0]}, {p['rows'][1]})",
            )
            for p in facts["pieces"]
        ]
        print_table("where its states are", table, headers=("positions", "shard", "block", "rows"))
    return 0


def _is_number(text: str, count: int) -> bool:
    if not text.isdecimal():
        return False
    if int(text) >= count:
        raise InputError(f"record {text} does not exist; the folder has {count:,} records, numbered from 0")
    return True


def _decoder(store: ShardStore) -> Any:
    """A function from token ids to text, or None with the reason on standard error."""
    from ..detokenize import load_decoder

    if store.target_dir is None:
        print("no target/ beside the streams; showing token ids", file=sys.stderr)
        return None
    try:
        return load_decoder(store.target_dir)
    except InputError as err:
        print(f"showing token ids: {err}", file=sys.stderr)
        return None


def _print_text(record: Record, decode: Any) -> None:
    """Prompt dim, response green, positions without states on red."""
    from rich.console import Console
    from rich.text import Text

    from ..detokenize import visible

    gaps = record.gaps
    text = Text()
    for span in record.spans or ():
        edges = {span.start, span.stop}
        edges |= {min(max(p, span.start), span.stop) for gap in gaps for p in gap}
        cuts = sorted(edges)
        for start, stop in itertools.pairwise(cuts):
            ids = record.token_ids[start:stop].tolist()
            shown = " ".join(map(str, ids)) + " " if decode is None else decode(ids)
            style = "green" if span.kind == "response" else "dim"
            if any(a <= start < b for a, b in gaps):
                style += " on red"
            text.append(visible(shown), style=style)
    Console(soft_wrap=True).print(text)


def _printable(text: str) -> str:
    """One line of captured text: control characters must not reach the terminal."""
    from ..detokenize import visible

    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


# ---- verify, repair


def _verify(args: argparse.Namespace) -> int:
    from ..shards.verify import verify_shards

    if args.content_rows < 0:
        raise InputError(f"--content-rows is {args.content_rows}; expected 0 or more")
    with progress_bar("verify", 1.0) as bar:
        shown = {"bytes": 0.0, "records": 0.3, "content": 0.5, "reference": 0.9}

        def progress(what: str, done: int, total: int) -> None:
            begin = shown[what]
            end = min([v for v in shown.values() if v > begin], default=1.0)
            bar.update(begin + (end - begin) * done / max(total, 1), what)

        report = verify_shards(
            args.path,
            target_dir=args.target,
            content_rows=args.content_rows,
            reference=args.reference,
            reference_records=args.reference_records,
            progress=progress,
        )
    if args.json:
        _print_json(report.to_json())
        return 0 if report.ok else 1
    for finding in report.findings[:50]:
        print(_printable(str(finding)))
    if len(report.findings) > 50:
        print(f"... and {len(report.findings) - 50} more; --json lists them")
    counts = report.counts
    rows = [
        ("read", f"{counts['num_shards']:,} shards, {counts['num_blocks']:,} blocks, "
                 f"{counts['num_records']:,} records, {counts['num_tokens']:,} tokens"),
    ]  # fmt: skip
    rows += [(name.replace("_", " "), _value(value)) for name, value in report.content.items()]
    rows += [("not checked", text) for text in report.not_checked]
    warnings = sum(n for name, n in counts.items() if name.startswith("warning "))
    verdict = "good" if report.ok else f"BAD: {report.num_errors:,} errors"
    rows.append(("verdict", f"{verdict}, {warnings:,} warnings"))
    print_table(str(args.path), rows)
    return 0 if report.ok else 1


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return "\n".join(f"{k}: {_value(v)}" if not isinstance(v, dict) else f"{k}: " + ", ".join(
            f"{n} {_value(w)}" for n, w in v.items()) for k, v in value.items())  # fmt: skip
    return str(value)


def _repair(args: argparse.Namespace) -> int:
    from ..shards.reader import open_shards
    from ..shards.repair import abandoned_journals, rebuild_sealed, seal_journal

    path = Path(args.path)
    if path.is_file():
        jobs = [(seal_journal if path.suffix == ".open" else rebuild_sealed, path)]
    elif path.is_dir():
        jobs = [(seal_journal, p) for p in abandoned_journals(path)]
        with open_shards(path, follow=True, ignore_differences=_all_differences()) as store:
            damaged = [p.path for p in store.skipped if p.path.suffix == ".safetensors"]
            for file in store.files():
                try:
                    file.index()
                except ShardError:
                    damaged.append(file.path)
        jobs += [(rebuild_sealed, p) for p in damaged if p.is_file() and not p.is_symlink()]
    else:
        raise InputError(f"{args.path!r} does not exist; name a shards folder or a shard file")
    done, failed = [], []
    for function, file_path in jobs:
        try:
            done.append(function(file_path))
        except (ShardError, StreamBusyError) as err:
            failed.append(str(err))
    if args.json:
        repaired = [
            {
                "path": str(r.path),
                "num_records": r.num_records,
                "num_blocks": r.num_blocks,
                "damaged_frames": r.damaged_frames,
                "cut_bytes": r.cut_bytes,
                "tail_path": None if r.tail_path is None else str(r.tail_path),
            }
            for r in done
        ]
        _print_json({"repaired": repaired, "failed": failed})
    else:
        for report in done:
            print(report)
        for message in failed:
            print(f"not repaired: {message}", file=sys.stderr)
        if not jobs:
            print("nothing to repair")
    return 1 if failed else 0


def _all_differences() -> tuple[str, ...]:
    from ..shards.reader import ALL_DIFFERENCES

    return ALL_DIFFERENCES


def _forget(args: argparse.Namespace) -> int:
    from ..shards.forget import forget

    if not args.records and not args.request_id:
        raise InputError("nothing to forget; name record ids or --request-id")
    with _open(args, mixed=True) as store:
        ids = list(args.records)
        wanted = set(args.request_id)
        if wanted:
            found = {r.meta.request_id: r.id for r in store if r.meta.request_id in wanted}
            missing = sorted(wanted - set(found))
            if missing:
                raise InputError(f"no record of request {missing[0]!r} in {args.path!r}")
            ids += [r.id for r in store if r.meta.request_id in wanted]
        report = forget(store, ids)
    if args.json:
        _print_json(
            {
                "num_records": report.num_records,
                "num_blocks": report.num_blocks,
                "kept_blocks": report.kept_blocks,
                "kept_for": list(report.kept_for),
                "shards": [str(path) for path in report.shards],
            }
        )
    else:
        print(
            f"erased {report.num_records:,} records and {report.num_blocks:,} blocks; "
            f"{report.kept_blocks:,} blocks stay because other requests share them"
            + (":" if report.kept_for else "")
        )
        for record_id in report.kept_for[:MAX_NAMED]:
            print(f"  {record_id}")
        if len(report.kept_for) > MAX_NAMED:  # a system prompt may be everybody's
            print(f"  and {len(report.kept_for) - MAX_NAMED:,} more; --json names all")
    return 0


def _import(args: argparse.Namespace) -> int:
    from ..shards.interchange import FORMATS, import_dump

    if args.format not in FORMATS:
        raise InputError(f"--from is {args.format!r}; expected {_FORMATS_HELP}")
    if not args.source.exists():
        raise InputError(f"{str(args.source)!r} does not exist; name the other tool's folder or file")
    shift = {None: None, "residual_in": 0, "layer_output": 1}[args.convention]
    with progress_bar("import", None) as bar:
        try:
            stream, counts = import_dump(
                args.format,
                args.source,
                Path(args.path),
                args.target,
                layer_ids=args.layers,
                layer_shift=shift,
                final_hidden=args.final_hidden,
                stream=args.stream,
                codec=args.codec,
                reference=args.reference,
                progress=lambda done: bar.update(done, f"{done:,} records"),
            )
        except SpecdecTapError as err:
            raise InputError(f"{err}; nothing was imported") from err
    _report_counts(args, f"stream {stream}: imported", counts)
    if args.reference is None and not args.json:
        print(
            "which layers these are, only a forward of the model can tell: "
            f"specdec-tap shards verify {args.path} --reference {args.target}"
        )
    return 0


def _export(args: argparse.Namespace) -> int:
    from ..shards.interchange import FORMATS, export_shards

    if args.format not in FORMATS:
        raise InputError(f"--to is {args.format!r}; expected {_FORMATS_HELP}")
    with _open(args) as store, progress_bar("export", None) as bar:
        counts = export_shards(
            store,
            args.out,
            args.format,
            stitched=not args.no_stitch,
            progress=lambda done: bar.update(done, f"{done:,} records"),
        )
    return _report_counts(args, "exported", counts)


def _report_counts(args: argparse.Namespace, what: str, counts: Any) -> int:
    if args.json:
        _print_json(dict(counts))
        return 0
    left = ", ".join(f"{n:,} {name}" for name, n in counts.items() if name.startswith("left out"))
    print(f"{what} {counts['records']:,} records, {counts['tokens']:,} tokens{'; ' + left if left else ''}")
    return 0


def _upload(args: argparse.Namespace) -> int:
    import threading

    from ..shards.remote import Uploader

    uploader = Uploader(Path(args.path), args.url, remove_local=args.remove_local)
    if args.follow:
        stop = threading.Event()
        try:
            uploader.follow(stop)
        except KeyboardInterrupt:
            stop.set()
    report = uploader.run_once()
    if args.json:
        _print_json(
            {
                "uploaded": report.uploaded,
                "already_there": report.already_there,
                "removed_locally": report.removed_locally,
                "failed": report.failed,
                "not_tried": report.not_tried,
            }
        )
    else:
        print(f"uploaded {len(report.uploaded):,} files, {report.already_there:,} were there")
        for message in report.failed:
            print(f"not uploaded: {message}", file=sys.stderr)
        if report.not_tried:
            print(f"not tried: {report.not_tried:,} more files; the store seems to be away", file=sys.stderr)
    return 1 if report.failed else 0
