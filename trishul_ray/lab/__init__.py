"""Extensions beyond the paper: methods, stages, codecs, tasks and datasets, one file each.

Code outside this folder neither imports these modules nor names the objects that they register. A
registry imports the modules that :data:`MODULES` lists, so that experiments can use their objects.
"""

#: Modules that register objects, keyed by the kind of their registry.
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
