# find_package(attnd) gives attnd::client. Relocatable: the paths follow from where this file lies.
get_filename_component(_attnd_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT TARGET attnd::client)
  add_library(attnd::client SHARED IMPORTED)
  set_target_properties(attnd::client PROPERTIES
    IMPORTED_LOCATION "${_attnd_prefix}/lib/libattnd_client.so"
    INTERFACE_INCLUDE_DIRECTORIES "${_attnd_prefix}/include")
endif()
unset(_attnd_prefix)
