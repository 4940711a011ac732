"""Parts of modules that tests compose by hand, with the weights of files."""


def normed(kind, files, eps, name="{}"):
    """Norms [.., 32] of a class, by the part of their names in files that `name` leaves open."""

    def norm(part, states):
        layer = kind(32, eps)
        layer.load_state_dict({"weight": files[f"{name.format(part)}.weight"]})
        return layer(states)

    return norm
