# Stands in for CMake's module of this name: what it defines, without Python's header files.
set(Python_FOUND TRUE)
function(Python_add_library name kind)
    set(sources ${ARGN})
    list(REMOVE_ITEM sources USE_SABI WITH_SOABI)
    add_library(${name} ${kind} ${sources})
endfunction()
