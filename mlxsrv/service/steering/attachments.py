"""SAEs: which ones are known, and attaching one to a model.

Whether an SAE fits a model is decided from their files, so that a refusal needs no load. The device
thread checks it again when both are loaded.
"""

from __future__ import annotations

import asyncio
import logging
import re

import msgspec

from mlxsrv.errors import (
    SAEAttached,
    SAEIncompatible,
    SAENotAttached,
    ServeError,
)
from mlxsrv.formats.sae_files import SAEFile
from mlxsrv.generation.steering import AttachmentObject, Compatibility, SAEObject
from mlxsrv.logs import log
from mlxsrv.models.catalogue.catalogue import Catalogue, ModelEntry
from mlxsrv.models.control_vectors import control_vectors
from mlxsrv.models.pool.attachments import Attachments
from mlxsrv.models.pool.model import Attachment
from mlxsrv.models.pool.pool import Pool
from mlxsrv.models.sae_library import SAEEntry, SAELibrary
from mlxsrv.options import SettingsError
from mlxsrv.settings import Settings

_log = logging.getLogger("mlxsrv.service")

# The model's name may hold any character; what follows it has no equals sign.
_WANTED = re.compile(
    r"(?:(?P<model>.+)=)?(?P<sae>[A-Za-z0-9._-]{1,100})(?:@(?P<layer>[0-9]{1,4}))?"
)


class StartupAttachment(msgspec.Struct, frozen=True):
    """An SAE that is attached when the server starts."""

    model: str
    sae: str
    layer: int | None


def startup_attachments(settings: Settings, catalogue: Catalogue) -> tuple[StartupAttachment, ...]:
    """The attachments that `--attach-sae` asks for. Blocks if it names models not known yet.

    Raises:
        SettingsError: it cannot be parsed, no such model is served, or a model is named twice.
    """
    wanted: dict[str, StartupAttachment] = {}
    for text in settings.attach_sae:
        said = _WANTED.fullmatch(text)
        if said is None:
            raise SettingsError(f"attach_sae: {text!r} is not [MODEL=]SAE[@LAYER]")
        if catalogue.known(said["model"]) is None:
            catalogue.scan()
        entry = catalogue.known(said["model"])
        if entry is None:
            raise SettingsError(f"attach_sae: the model {said['model']!r} is not served here")
        if entry.name in wanted:
            raise SettingsError(f"attach_sae: {entry.name!r} can have one SAE, not two")
        layer = None if said["layer"] is None else int(said["layer"])
        wanted[entry.name] = StartupAttachment(entry.name, said["sae"], layer)
    return tuple(wanted.values())


def check_steering_settings(settings: Settings, catalogue: Catalogue) -> None:
    """Check the settings of steering. Raises SettingsError."""
    startup_attachments(settings, catalogue)
    control_vectors(settings)
    SAELibrary(settings)


class SAEs:
    """The SAEs of one app, and the models that they are attached to."""

    def __init__(self, pool: Pool, settings: Settings) -> None:
        self._pool = pool
        self._attachments = Attachments(pool)
        self._library = SAELibrary(settings)
        self._wanted = startup_attachments(settings, pool.catalogue)
        self._beginning: asyncio.Task[None] | None = None

    # Known SAEs.

    async def all(self) -> list[SAEObject]:
        await self._library.refresh()
        return [self._object(known) for known in self._library]

    async def one(self, id: str) -> SAEObject:
        """Raises SAENotFound."""
        return self._object(await self._known(id))

    async def register(
        self,
        *,
        repository: str | None,
        path: str | None,
        revision: str | None,
        file_path: str | None,
        id: str | None,
    ) -> SAEObject:
        """As `SAELibrary.register`. Raises InvalidRequest, SAEExists."""
        await self._library.refresh()
        known = await self._library.register(
            repository=repository, path=path, revision=revision, file_path=file_path, id=id
        )
        return self._object(known)

    async def forget(self, id: str) -> None:
        """Forget an SAE. Raises SAENotFound; SAEAttached while a model has it."""
        await self._known(id)
        models = self._attached_to(id)
        if models:
            raise SAEAttached(f"{id} is attached to {', '.join(models)}; detach it first")
        self._library.forget(id)

    async def _known(self, id: str) -> SAEEntry:
        await self._library.refresh()
        return self._library.get(id)

    def _attached_to(self, id: str) -> tuple[str, ...]:
        attachments = self._pool.attachments.values()
        return tuple(sorted(each.model for each in attachments if each.sae_id == id))

    def _object(self, known: SAEEntry) -> SAEObject:
        models = self._attached_to(known.id)
        shown = SAEObject(
            id=known.id,
            state="attached" if models else known.state,
            origin=known.origin,
            problem=known.problem,
            attached_to=models,
        )
        file = known.file
        if file is None:
            return shown
        return msgspec.structs.replace(
            shown,
            architecture=file.architecture,
            d_in=file.d_in,
            d_sae=file.d_sae,
            layer=file.layer,
            hook_name=file.hook_name,
            model_name=file.model_name,
            bytes=file.bytes,
            warnings=file.warnings,
        )

    # Models.

    async def compatibility(
        self, id: str, model: str | None, layer: int | None = None
    ) -> Compatibility:
        """Whether the SAE can be attached. Raises SAENotFound, ModelNotFound."""
        return _compare(await self._known(id), await self._entry(model), layer)

    async def _entry(self, model: str | None) -> ModelEntry:
        """The model's entry, with the description of its files. Raises ModelNotFound."""
        catalogue = self._pool.catalogue
        await catalogue.refresh()
        return await catalogue.find(model, download=False)

    async def attach(self, id: str, model: str | None, layer: int | None) -> AttachmentObject:
        """Attach an SAE to a model, at `layer` or else at the layer that it was trained on.

        Raises:
            SAENotFound, ModelNotFound: there is no SAE or model of that name.
            SAEAttached: the model has an SAE already.
            SAEIncompatible: the SAE does not fit; the message says why.
            ServeError: the model cannot be loaded.
        """
        known, entry = await self._known(id), await self._entry(model)
        there = self._pool.attachments.get(entry.name)
        if there is not None:
            raise SAEAttached(
                f"{entry.name} has the SAE {there.sae_id} at layer {there.layer}; detach it first"
            )
        fits = _compare(known, entry, layer)
        file, path = known.file, known.path
        if file is not None and layer is None:
            layer = file.layer
            if layer is None:
                raise SAEIncompatible(
                    f"layer: {id} does not say for which it is; give one", param="layer"
                )
        if not fits.compatible or file is None or path is None or layer is None:
            raise SAEIncompatible(f"{id} cannot be attached: {'; '.join(fits.reasons)}")
        attachment = await self._attachments.attach(entry, id, path, file, layer, file.before)
        for warning in fits.warnings:
            log(_log, logging.WARNING, "SAE warning", sae=id, model=entry.name, reason=warning)
        log(_log, logging.INFO, "SAE attached", sae=id, model=entry.name, layer=layer)
        return _attachment_object(entry.name, attachment)

    async def detach(self, id: str, model: str | None) -> AttachmentObject:
        """Detach an SAE. Raises SAENotFound, ModelNotFound; SAENotAttached if the model does not
        have this one."""
        name = await self.name(model)
        there = self._pool.attachments.get(name)
        if there is None or there.sae_id != id:
            await self._known(id)
            elsewhere = ", ".join(self._attached_to(id))
            hint = f"; it is attached to {elsewhere}" if elsewhere else ""
            raise SAENotAttached(f"{id} is not attached to {name}{hint}")
        self._attachments.detach(name)
        log(_log, logging.INFO, "SAE detached", sae=id, model=name)
        return _attachment_object(name, None)

    async def attachment(self, model: str | None) -> AttachmentObject:
        """The attachment of a model. Raises ModelNotFound."""
        name = await self.name(model)
        return _attachment_object(name, self._pool.attachments.get(name))

    async def name(self, model: str | None) -> str:
        """The full name of the model that a request names. Raises ModelNotFound."""
        name = self._pool.catalogue.name(model)
        if name not in self._pool.attachments:
            name = (await self._pool.catalogue.find(model, download=False)).name
        return name

    # Life.

    async def begin(self) -> None:
        """Attach what `--attach-sae` names; return when that is over. Only the first call does it,
        and later ones wait for it too. A failure is logged, and the server goes on without."""
        if self._beginning is None:
            self._beginning = asyncio.create_task(self._attach_wanted())
        # The task itself is not awaited: cancelling a caller must not cancel it, nor the reverse.
        await asyncio.wait([self._beginning])

    async def _attach_wanted(self) -> None:
        for wanted in self._wanted:
            try:
                await self.attach(wanted.sae, wanted.model, wanted.layer)
            except ServeError as error:
                log(
                    _log,
                    logging.ERROR,
                    "SAE not attached",
                    sae=wanted.sae,
                    model=wanted.model,
                    reason=error.message,
                )
            except Exception:
                _log.exception("SAE not attached")

    async def shut_down(self) -> None:
        """Cancel what is under way."""
        if self._beginning is not None:
            self._beginning.cancel()
            await asyncio.gather(self._beginning, return_exceptions=True)
        await self._library.stop_downloads()


def _compare(known: SAEEntry, entry: ModelEntry, layer: int | None) -> Compatibility:
    """Whether an SAE fits this layer of a model; None: the layer that it was trained on."""
    file = known.file
    if file is None:
        reason = known.problem or "it is still being downloaded"
        return Compatibility(compatible=False, reasons=(reason,), warnings=())
    reasons = _misfits(file, entry, file.layer if layer is None else layer)
    warnings = (*file.warnings, *_doubts(file, entry, layer))
    return Compatibility(compatible=not reasons, reasons=tuple(reasons), warnings=warnings)


def _misfits(file: SAEFile, entry: ModelEntry, layer: int | None) -> list[str]:
    """The reasons why an SAE cannot be at a layer of a model."""
    said, reasons = entry.description, []
    if layer is None:
        reasons.append("its files do not say at which layer it is; name one")
    if said is None:
        return reasons
    if not said.writes:
        reasons.append("the model generates no text")
    if said.hidden_size is not None and said.hidden_size != file.d_in:
        reasons.append(f"it is {file.d_in} wide, and the model {said.hidden_size}")
    if said.layers is not None and layer is not None and layer >= said.layers:
        reasons.append(f"the model has no layer {layer}: there are 0 to {said.layers - 1}")
    return reasons


def _doubts(file: SAEFile, entry: ModelEntry, layer: int | None) -> list[str]:
    """The reasons why an SAE may not work as it was trained to."""
    doubts = []
    if entry.description is None:
        doubts.append("the model's files are not here, so it is not known whether it fits")
    if layer is not None and file.layer is not None and layer != file.layer:
        doubts.append(f"it was trained on layer {file.layer}, not {layer}")
    trained_on = (file.model_name or "").rpartition("/")[2]
    names = [entry.name, *entry.aliases, str(entry.source.place)]
    if trained_on and not any(trained_on.casefold() in name.casefold() for name in names):
        doubts.append(f"it was trained on {file.model_name}; whether this is it, is not known")
    return doubts


def _attachment_object(model: str, attachment: Attachment | None) -> AttachmentObject:
    if attachment is None:
        return AttachmentObject(attached=False, model=model)
    return AttachmentObject(
        attached=True,
        model=model,
        sae_id=attachment.sae_id,
        layer=attachment.layer,
        hook="resid_pre" if attachment.before else "resid_post",
        d_in=attachment.file.d_in,
        d_sae=attachment.file.d_sae,
        architecture=attachment.file.architecture,
        bytes=attachment.bytes,
        since=attachment.since,
    )
