from tests.mesh.conftest import mock_mesh, preloaded

__all__ = ["mock_mesh", "preloaded"]
