"""Profiles: named steering that outlives a restart. One may be the default steering of a model.

The store blocks, so it is called in worker threads. Methods that read a profile and then act on it
hold a lock, so that none acts on a profile that has changed meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread
import msgspec

from mlxsrv.errors import InvalidFeatureIndex, ProfileNotFound, SAENotAttached
from mlxsrv.models.profile_store import Profile, ProfileStore
from mlxsrv.service.steering.registry import ModelSteering, SteeringRegistry
from mlxsrv.wire.management import (
    ProfileContent,
    ProfileExport,
    ProfileObject,
    ProfileRequest,
    ProfileUpdate,
    SteeringObject,
)

V = TypeVar("V")


class Profiles:
    """The profiles of one app. Every method may raise StoreFailed."""

    def __init__(self, registry: SteeringRegistry, store: ProfileStore) -> None:
        self._registry = registry
        self._store = store
        self._changing = anyio.Lock()

    async def all(self) -> list[ProfileObject]:
        """All profiles, sorted by name."""
        return [_object(profile) for profile in await _in_thread(self._store.profiles)]

    async def one(self, id: str) -> ProfileObject:
        """Raises ProfileNotFound."""
        return _object(await self._profile(id))

    async def _profile(self, id: str) -> Profile:
        return await _in_thread(lambda: self._store.profile(id))

    async def add(self, request: ProfileRequest) -> ProfileObject:
        """Store a new profile. Raises ProfileExists if the name is taken; InvalidFeatureIndex."""
        now = time.time()
        profile = Profile(
            name=request.name,
            description=request.description or "",
            steering=request.steering,
            mode=request.mode or "additive",
            model_id=request.model_id,
            sae_id=request.sae_id,
            layer=request.layer,
            created_at=now,
            updated_at=now,
        )
        _check_features(profile)
        await _in_thread(lambda: self._store.add(profile))
        return _object(profile)

    async def update(self, id: str, request: ProfileUpdate) -> ProfileObject:
        """Change what is given. A default steering that is this profile changes with it, or ends
        if the profile does not fit any more.

        Raises:
            ProfileNotFound, ProfileExists, InvalidFeatureIndex.
        """
        given = msgspec.structs.asdict(request)
        changes = {name: value for name, value in given.items() if value is not None}
        async with self._changing:
            profile = msgspec.structs.replace(
                await self._profile(id), **changes, updated_at=time.time()
            )
            _check_features(profile)
            await _in_thread(lambda: self._store.replace(profile))
            for attached in self._registry.with_profile(id):
                self._follow(attached, profile)
        return _object(profile)

    def _follow(self, attached: ModelSteering, profile: Profile) -> None:
        try:
            fits = self._registry.for_profile(profile) is attached
        except (SAENotAttached, InvalidFeatureIndex):
            fits = False
        if not fits:
            attached.remove_features(None)
        else:
            attached.values, attached.mode = dict(profile.steering), profile.mode

    async def remove(self, id: str) -> None:
        """Delete a profile. Default steering that is this profile ends. Raises ProfileNotFound."""
        async with self._changing:
            try:
                await _in_thread(lambda: self._store.remove(id))
            except ProfileNotFound:  # another process may have deleted it: here it ends as well
                self._end(id)
                raise
            self._end(id)

    def _end(self, id: str) -> None:
        for attached in self._registry.with_profile(id):
            attached.remove_features(None)

    # The default steering.

    async def activate(self, id: str) -> SteeringObject:
        """Make the profile the default steering of its model.

        Raises:
            ProfileNotFound.
            SAENotAttached: its SAE is not attached at its layer of its model.
            InvalidFeatureIndex: the SAE has no such feature.
        """
        async with self._changing:
            profile = await self._profile(id)
            attached = self._registry.for_profile(profile)
            attached.use_profile(profile)
            return attached.as_object

    async def deactivate(self, model: str | None) -> SteeringObject:
        """End a model's active profile, if it has one. Raises ModelNotFound, SAENotAttached."""
        attached = await self._registry.find(model)
        if attached.profile is not None:
            attached.remove_features(None)
        return attached.as_object

    async def deactivate_one(self, id: str) -> SteeringObject:
        """As `deactivate`, for the profile's own model, and only if the profile is active.

        Raises:
            ProfileNotFound, ModelNotFound, SAENotAttached.
        """
        async with self._changing:
            profile = await self._profile(id)
            attached = await self._registry.find(profile.model_id)
            if attached.profile == id:
                attached.remove_features(None)
            return attached.as_object

    async def active(self, model: str | None) -> ProfileObject | None:
        """A model's active profile. Raises ModelNotFound."""
        try:
            attached = await self._registry.find(model)
        except SAENotAttached:
            return None
        if attached.profile is None:
            return None
        return await self.one(attached.profile)

    # Files.

    async def export(self, id: str) -> ProfileExport:
        """Raises ProfileNotFound."""
        profile = msgspec.structs.asdict(await self._profile(id))
        content = {name: profile[name] for name in ProfileContent.__struct_fields__}
        return ProfileExport(profile=ProfileContent(**content))


def _check_features(profile: Profile) -> None:
    """Raises InvalidFeatureIndex for numbers that no SAE has. Others are checked at activation."""
    for feature in profile.steering:
        if not 0 <= feature < _MOST_FEATURES:
            raise InvalidFeatureIndex(
                f"steering: {feature!r:.30} is no feature of any SAE", param="steering"
            )


_MOST_FEATURES = 10**9


async def _in_thread(work: Callable[[], V]) -> V:
    return await anyio.to_thread.run_sync(work)


def _object(profile: Profile) -> ProfileObject:
    return ProfileObject(**msgspec.structs.asdict(profile))
