"""What tests of engines have beside the others."""

from ssh_hosts import ssh_hosts  # noqa: F401, a fixture
