"""Checkpoints: saved at one layout, loaded at any other, under the names of the plain module."""

from lightning_3d.checkpoint.asynchronous import BackgroundSaves
from lightning_3d.checkpoint.copies import place_copies
from lightning_3d.checkpoint.directory import check_exists, is_checkpoint, link, links_to, local_path, remove
from lightning_3d.checkpoint.export import Exported, export_hugging_face
from lightning_3d.checkpoint.full import consolidate, full_state_dict, iterate_full, to_lightning
from lightning_3d.checkpoint.importing import Imported, import_hugging_face, import_lightning
from lightning_3d.checkpoint.load import load, load_model, read
from lightning_3d.checkpoint.names import group_names, original_name, state_dict_keys
from lightning_3d.checkpoint.optimizer_state import load_optimizers
from lightning_3d.checkpoint.parts import WholeValues, part_of
from lightning_3d.checkpoint.save import RANK_STATE, Content, agreed_path, gather, save, write
from lightning_3d.checkpoint.state import ModelState
from lightning_3d.checkpoint.stock_file import StockFile, write_lightning

__all__ = [
    "RANK_STATE",
    "BackgroundSaves",
    "Content",
    "Exported",
    "Imported",
    "ModelState",
    "StockFile",
    "WholeValues",
    "agreed_path",
    "check_exists",
    "consolidate",
    "export_hugging_face",
    "full_state_dict",
    "gather",
    "group_names",
    "import_hugging_face",
    "import_lightning",
    "is_checkpoint",
    "iterate_full",
    "link",
    "links_to",
    "load",
    "load_model",
    "load_optimizers",
    "local_path",
    "original_name",
    "part_of",
    "place_copies",
    "read",
    "remove",
    "save",
    "state_dict_keys",
    "to_lightning",
    "write",
    "write_lightning",
]
