"""MDS shards of MosaicML's streaming datasets, with texts or with tokens of another model."""

from __future__ import annotations

import glob
import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bosch.errors import UserError
from data_prep.documents.mds_index import INDEX, read_index
from data_prep.documents.sources import Kind, Part, Source
from data_prep.source_files import files_below


class _Mds(Kind):
    about = "MDS shards below `path`"

    def files(self, where: str, path: str) -> list[Path]:
        """The index files; only the merged index if a folder has one."""
        root = Path(path).expanduser()
        roots = [root] if root.is_dir() else map(Path, glob.glob(str(root), recursive=True))
        indices = {file for folder in roots for file in files_below(folder) if file.name == INDEX}
        if not indices:
            raise UserError(f"there is no {INDEX} below {path}; expected MDS shards", where)
        folders = {index.parent for index in indices}
        return sorted(index for index in indices if not folders.intersection(index.parent.parents))

    def identity(self, where: str, path: str) -> list[Path]:
        """The index files (their hashes are verified while reading) and shards without hashes."""
        indices = self.files(where, path)
        shards = ((index.parent, shard) for index in indices for shard in read_index(index))
        return indices + [
            shard.file(folder)[0] for folder, shard in shards if not shard.raw_data.hashes
        ]

    def parts(self, source: Source, seed: int, sequence_length: int) -> Iterable[Part]:
        for index in source.files:
            for shard in read_index(index):
                shard.file(index.parent)  # raises if the file is missing
                column = shard.document_column(f"source {source.name}: {index}", source.text_field)
                if source.tokenizer is None and not shard.is_text(column):
                    raise UserError(
                        f"source {source.name}: column `{column}` of {index} holds tokens; name "
                        "their tokenizer as `tokenizer`"
                    )
                yield Part((index.parent,), shard=shard)

    def read(self, part: Part, source: Source) -> Any:
        assert part.shard is not None
        [folder], shard = part.paths, part.shard
        column = shard.document_column(f"source {source.name}", source.text_field)
        tokenizers, mds = (
            importlib.import_module(f"data_prep.documents.{name}") for name in ("tokenizer", "mds")
        )
        if shard.is_text(column):
            return mds.read_texts(folder, shard, column)
        assert source.tokenizer is not None
        tokenizer = tokenizers.load_tokenizer(tokenizers.TokenizerSpec(source.tokenizer))
        return mds.read_tokens(folder, shard, column, tokenizer, source.special_tokens)


KIND = _Mds()
