"""The routes of a job, durable: a route is saved before the first epoch that uses it."""

from __future__ import annotations

from anabranch.checkpoint import documents, paths
from anabranch.checkpoint.generations import check_generation
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import Generation, RouteVersion
from anabranch.core.routes import Route


def save_route(storage: Storage, route: Route, *, generation: Generation) -> None:
    """Saves a route under its version, in place of one of an epoch that was rolled back.

    FencedError if a newer driver than ``generation`` has taken over.
    """
    check_generation(storage, generation)
    storage.write(paths.route_file(route.version), documents.encode({"route": route.to_json()}))


def newest_route(storage: Storage) -> Route | None:
    """The route with the largest version; None if none was ever saved."""
    versions = [paths.route_version_of(name) for name in storage.list_names(paths.ROUTES)]
    newest = max((version for version in versions if version is not None), default=None)
    return None if newest is None else load_route(storage, newest)


def load_route(storage: Storage, version: RouteVersion) -> Route:
    """The route of this version, as a manifest names it."""
    path = paths.route_file(version)
    content = documents.decode(storage, path, storage.read(path))
    try:
        route = Route.from_json(content["route"])
    except (KeyError, CheckpointError) as error:
        raise documents.unexpected(storage, path, repr(error)) from error
    if route.version != version:
        raise documents.unexpected(storage, path, f"it is route {route.version}")
    return route
