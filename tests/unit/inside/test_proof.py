"""How nodes of a job know each other: by a secret that all of them have."""

from distmagic.connection.certificate import shared_secret
from distmagic.errors import UsageError
from distmagic.inside.proof import proof_of
from tests.builders.dialling import places


def test_the_proof_of_the_environment(golden):
    place, _ = places()
    assert proof_of({}, place) is None
    with golden.raises(UsageError):
        proof_of({"DISTMAGIC_SECRET": "short"}, place)
    assert proof_of({"DISTMAGIC_SECRET": "0123456789abcdef"}, place) is not None


def test_one_secret_makes_one_certificate_a_job():
    one = shared_secret("0123456789abcdef", "slurm 7.0")
    assert one == shared_secret("0123456789abcdef", "slurm 7.0")
    assert one.certificate != shared_secret("0123456789abcdef", "slurm 8.0").certificate
    assert one.certificate != shared_secret("0123456789abcdeF", "slurm 7.0").certificate
    assert "0123456789abcdef" not in one.certificate + repr(one)
