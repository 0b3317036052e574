"""Extensions beyond the paper, each in its own file.

Nothing outside this folder imports it, or names its content. A registry imports the modules that
:data:`MODULES` lists, so that experiments can name what they register.
"""

#: The modules that register something, by the field of its registry.
MODULES = {
    "method": (
        *("methods.ditto", "methods.fedplora", "methods.fedrot", "methods.federa", "methods.fedsa"),
        *("methods.fedsvd", "methods.florg", "methods.florist", "methods.frlora", "methods.fslora"),
        *("methods.lorafair", "methods.private", "methods.rolora"),
    ),
    "stage": (
        *("attack", "clock.asynchronous", "clock.stage", "codecs.stage", "privacy.stage"),
        *("robust", "server_optimizer"),
    ),
    "check": ("codecs.checks",),
    "task.kind": ("tasks.regression",),
    "data.name": ("datasets.commonsense", "datasets.stsb"),
}
