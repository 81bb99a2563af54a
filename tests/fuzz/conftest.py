from tests.mesh.conftest import mock_mesh

__all__ = ["mock_mesh"]
