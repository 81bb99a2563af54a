"""Tests of tests/mesh, over servers with TLS and minimal rights of each role."""

import pytest

from tests.mesh.test_failure_policy import (
    test_a_killed_prefill_fails_its_requests_with_a_502_and_no_stream_that_has_begun,
)
from tests.mesh.test_kept_responses import test_responses_outlive_their_frontend
from tests.mesh.test_losses import (
    test_two_hundred_requests_survive_their_prefill_instances_being_killed,
    test_without_any_prefill_instance_or_without_bootstrap_decode_computes_the_prompt_itself,
)
from tests.mesh.test_mock_mesh import (
    test_200_prompts_give_the_same_tokens_aggregated_and_disaggregated,
    test_pages_of_different_sizes_change_no_token,
    test_streams_that_move_go_on_with_the_tokens_they_would_have_had,
)

pytestmark = [pytest.mark.mesh, pytest.mark.secure]

__all__ = [
    "test_200_prompts_give_the_same_tokens_aggregated_and_disaggregated",
    "test_a_killed_prefill_fails_its_requests_with_a_502_and_no_stream_that_has_begun",
    "test_pages_of_different_sizes_change_no_token",
    "test_responses_outlive_their_frontend",
    "test_streams_that_move_go_on_with_the_tokens_they_would_have_had",
    "test_two_hundred_requests_survive_their_prefill_instances_being_killed",
    "test_without_any_prefill_instance_or_without_bootstrap_decode_computes_the_prompt_itself",
]
