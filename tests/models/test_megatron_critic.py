"""A critic whose body ranks of Megatron-Core share comes to what one process of Hugging Face does."""

from tests.support import megatron as megatron
from tests.support.megatron_critic import test_a_shared_body_has_the_values_and_gradients_of_the_whole  # noqa: F401
